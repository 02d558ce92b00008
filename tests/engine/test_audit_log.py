"""The line that every act by hand leaves in the log."""

import logging

import pytest

from semel.engine.audit_log import log_act


def test_a_line_has_one_form_and_its_fields_for_structured_logs(caplog: pytest.LogCaptureFixture) -> None:
    line = log_act("release", "ann", "console", id="9f86", operation='pay "x"', count=2)
    (record,) = caplog.records
    assert (record.name, record.levelno, record.getMessage()) == ("semel.audit", logging.WARNING, line)
    at = record.semel_audit.pop("at")  # type: ignore[attr-defined]
    assert line == f'release by ann at {at}: via="console" id="9f86" operation="pay \\"x\\"" count=2 changed=true'
    assert record.semel_audit == {  # type: ignore[attr-defined]
        "action": "release", "who": "ann", "via": "console", "id": "9f86", "operation": 'pay "x"', "count": 2,
        "changed": True,
    }  # fmt: skip


def test_nobody_can_forge_a_line(caplog: pytest.LogCaptureFixture) -> None:
    line = log_act("x\ry", "ann\nrelease by bob", "admin", changed=False, operation="pay\n\x1b[2J", refused="no")
    assert line.isprintable()
    assert "changed=false" in line
