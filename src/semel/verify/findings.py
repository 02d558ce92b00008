"""What a check of a service has found: a list, as text or as plain data, and whether it is bad."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Final

from semel.core.values import value

ERROR: Final = "error"
WARNING: Final = "warning"


@value
class Finding:
    """One thing to mend."""

    rule: str
    severity: str
    """``error`` or ``warning``."""
    message: str
    method: str = ""
    """The method and the path of a route, if the finding is about one."""
    path: str = ""


def failed(findings: Iterable[Finding]) -> bool:
    """Whether one of them is an error."""
    return any(finding.severity == ERROR for finding in findings)


def plain(findings: Iterable[Finding]) -> list[dict[str, Any]]:
    """The findings for JSON."""
    return [
        {
            "rule": each.rule,
            "path": each.path,
            "method": each.method,
            "severity": each.severity,
            "message": each.message,
        }
        for each in findings
    ]


def lines(findings: Sequence[Finding]) -> list[str]:
    """A line for each finding, errors first."""
    return [
        f"{each.severity:<8} "
        + (f"{each.method:<6} {each.path}  " if each.path else "")
        + f"{each.message} [{each.rule}]"
        for each in sorted(findings, key=lambda each: (each.severity, each.path, each.method))
    ]


def summary(findings: Iterable[Finding]) -> str:
    """How many errors and warnings there are."""
    found = Counter(each.severity for each in findings)
    return ", ".join(f"{found[kind]} {kind}{'' if found[kind] == 1 else 's'}" for kind in (ERROR, WARNING))
