"""The exit codes, and which error leads to which."""

from __future__ import annotations

from typing import Final

from semel.errors import ConfigurationError, NotResolvable, RequestError, SemelError, StoreError

__all__ = ["FAILED", "INTERRUPTED", "OK", "STORE", "USAGE", "exit_code"]

OK: Final = 0
FAILED: Final = 1
"""The command ran, and the answer is no: a check failed, a storm was not clean, a record was not found."""
USAGE: Final = 2
"""The command line, the URL or the set-up is wrong; argparse uses the same number."""
STORE: Final = 3
"""The store could not be reached, or refused."""
INTERRUPTED: Final = 130
"""Ctrl-C, numbered as shells do."""


def exit_code(error: SemelError) -> int:
    """The exit code for an error."""
    if isinstance(error, StoreError):
        return STORE
    if isinstance(error, NotResolvable):
        return FAILED
    return USAGE if isinstance(error, (ConfigurationError, RequestError)) else FAILED
