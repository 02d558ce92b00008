"""What tests of the commands share: a terminal, and an operation whose outcome nobody knows."""

from __future__ import annotations

import io

import pytest

from semel import Semel


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class _Gone(BaseException):
    """What no policy remembers: the attempt ends without a word."""


def leave_in_doubt(guard: Semel, key: str = "doubtful") -> None:
    """Leave the record of ``pay`` and this key in the state UNKNOWN."""

    def go_silent() -> None:
        raise _Gone

    with pytest.raises(_Gone):
        guard.run("pay", key=key, call=go_silent, guarantee="at_most_once")
