"""Numbers, times and keys as people read them on the pages, and numbers as addresses and forms have them."""

from __future__ import annotations

import json
import time
from typing import Any

from semel.core.policy import duration


def count(number: float | None) -> str:
    """``12,345``; above that ``1.23 M``."""
    if number is None:
        return "–"
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e5, "k")):
        if number >= size:
            return f"{number / (1e3 if unit == 'k' else size):.4g} {unit}"
    return f"{number:,.0f}"


def capped(number: int, most: int) -> str:
    """A number that was counted up to a limit: ``10,000 or more``."""
    return f"{count(number)} or more" if number >= most else count(number)


def rate(per_second: float | None) -> str:
    """``3.2/s``, or ``12/min`` if it is slow."""
    if per_second is None:
        return "–"
    if per_second >= 1:
        return f"{per_second:,.3g}/s" if per_second < 100 else f"{per_second:,.0f}/s"
    return f"{per_second * 60:.3g}/min"


def percent(share: float | None) -> str:
    """``12.3 %``."""
    if share is None:
        return "–"
    return f"{share:.0%}" if share in (0.0, 1.0) else f"{share:.1%}"


def duration_or_dash(seconds: float | None) -> str:
    """``3d4h``, or ``–`` if it is unknown."""
    return "–" if seconds is None else duration(seconds)


def clock(at: float) -> str:
    """The time of day of an instant, in UTC: ``14:03:07``; with the date if it was before yesterday."""
    far = abs(time.time() - at) > 86400
    return time.strftime("%Y-%m-%d %H:%M:%S" if far else "%H:%M:%S", time.gmtime(at))


def instant(at: float) -> str:
    """ISO 8601, in UTC."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at))


def whole_number(text: str, digits: int = 18) -> int | None:
    """The number that a text means; None if it is not of digits only, or of more than these."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= digits else None


def mask(text: str | None) -> str | None:
    """The first characters of a key, so that two can be told apart and none can be used."""
    if not text:
        return text
    return text[: min(4, len(text) // 3)] + "…"


def as_json(content: Any) -> str:
    """A stored value, as JSON that people can read; a text as it is."""
    return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False, indent=2, default=repr)
