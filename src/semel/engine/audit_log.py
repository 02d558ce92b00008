"""The log of what people do by hand: on the command line, in the console, in Django's admin. One line for each act.

::

    release by ann at 2026-11-16T18:02:11Z: via="console" store="shop" id="9f86d081…" operation="pay" changed=true
"""

from __future__ import annotations

import json
import logging
import time
from typing import Any, Literal

_log = logging.getLogger("semel.audit")


def log_act(
    action: str,
    who: str,
    via: Literal["cli", "console", "admin"],
    *,
    changed: bool = True,
    level: int = logging.WARNING,
    **what: Any,
) -> str:
    """Write to the logger ``semel.audit`` who has done what, when, and to which record. Returns the line.

    For structured handlers, the log record carries the same as a dict, as ``semel_audit``.

    :param changed: False: it was refused, or there was nothing to change.
    :param level: the default is shown without any set-up of logging.
    :param what: the record by its identity, never by its key: a key may be private, and logs travel far.
    """
    at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    details = {"via": via, **what, "changed": changed}
    words = " ".join(f"{name}={json.dumps(value, default=repr)}" for name, value in details.items())
    line = f"{_one_line(action)} by {_one_line(who)} at {at}: {words}"
    _log.log(level, "%s", line, extra={"semel_audit": {"action": action, "who": who, "at": at, **details}})
    return line


def _one_line(text: str) -> str:
    """Escape what is not printable: whoever names an act cannot write lines of their own into the log."""
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)
