"""The options of a broker's URL, which stand behind its ``?``."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any
from urllib.parse import SplitResult, parse_qsl, unquote, urlencode, urlsplit, urlunsplit

from semel.errors import ConfigurationError, PolicyError


def parse_url(url: str) -> SplitResult:
    """Split a URL into its parts. Raises ConfigurationError, because the ValueError of ``urlsplit`` quotes the host
    together with the password."""
    try:
        return urlsplit(url)
    except ValueError:
        raise ConfigurationError("the broker's URL cannot be parsed: its host is not valid") from None


def split_options(
    url: str, known: Mapping[str, Callable[[str], Any]], others: Collection[str] | None = None
) -> tuple[str, dict[str, Any]]:
    """Return the URL without the options that are ``known``, and their values. Errors never quote the URL.

    :param known: the function that reads each option. It raises ValueError with what the value should be.
    :param others: the options that the URL may have as well, for a driver. Defaults to any.
    """
    parts = parse_url(url)
    found: dict[str, Any] = {}
    rest = []
    for name, text in parse_qsl(parts.query, keep_blank_values=True):
        if name not in known:
            if others is not None and name not in others:
                raise _unknown(list(dict.fromkeys((*known, *others))))
            rest.append((name, text))
            continue
        try:
            found[name] = known[name](text)
        except PolicyError:
            raise
        except ValueError as expected:
            raise ConfigurationError(f"{name} of a broker's URL is {expected}") from None
    return urlunsplit(parts._replace(query=urlencode(rest))), found


def read_url(url: str, known: Mapping[str, Callable[[str], Any]]) -> tuple[str, str, dict[str, Any]]:
    """Return the host, the name and the options of ``scheme://host/name?option=…``.

    Raises ConfigurationError if the URL has an option that is not ``known``.
    """
    plain, found = split_options(url, known)
    parts = urlsplit(plain)
    if parts.query:
        raise _unknown(known)
    return parts.netloc, unquote(parts.path[1:]), found


def _unknown(known: Collection[str]) -> ConfigurationError:
    return ConfigurationError(f"the broker's URL has an unknown option; the options are: {', '.join(known)}")


def number(text: str) -> int:
    """Read a number from 1 on."""
    if not text.isdecimal() or len(text) > 12 or not int(text):
        raise ValueError("a number from 1 on")
    return int(text)


def flag(text: str) -> bool:
    """Read yes or no."""
    if text.lower() not in ("true", "false", "yes", "no", "1", "0"):
        raise ValueError("yes or no")
    return text.lower() in ("true", "yes", "1")
