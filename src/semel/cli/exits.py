"""What the exit codes mean, and which error ends with which."""

from __future__ import annotations

from typing import Final

from semel.errors import ConfigurationError, NotResolvable, RequestError, SemelError, StoreError

__all__ = ["FAILED", "INTERRUPTED", "OK", "STORE", "USAGE", "exit_code"]

OK: Final = 0
FAILED: Final = 1
"""The command worked and its answer is no: a check, a verdict or a look-up failed."""
USAGE: Final = 2
"""The command line, the URL or the set-up is wrong; argparse uses the same number."""
STORE: Final = 3
"""The store could not be reached, or refused."""
INTERRUPTED: Final = 130
"""Ctrl-C, as shells number it."""


def exit_code(error: SemelError) -> int:
    """The exit code of an error of our tree."""
    if isinstance(error, StoreError):
        return STORE
    if isinstance(error, NotResolvable):
        return FAILED
    return USAGE if isinstance(error, (ConfigurationError, RequestError)) else FAILED
