"""Charts as inline SVG, drawn here: no script, no style attribute, readable without colour."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from semel.errors import MissingDependency

try:
    from markupsafe import Markup, escape
except ImportError as error:
    raise MissingDependency("jinja2", "console") from error  # which brings it

_GAP: Final = 1
_SMALL: Final = 28
"""The height of a small chart."""
_FLOOR: Final = 2
"""The height of the smallest bar that is not zero, so that one call in an hour is seen."""


def bars(series: Sequence[tuple[str, Sequence[float]]], label: str, *, width: int, height: int) -> Markup:
    """Draw stacked bars, one for each minute.

    :param series: the class of each layer from the bottom up, and its values.
    :param label: what a screen reader says.
    """
    length = max((len(values) for _, values in series), default=0)
    totals = [sum(values[at] for _, values in series) for at in range(length)]
    top = max(totals, default=0) or 1
    step = width / max(1, length)
    shapes = []
    for at in range(length):
        base = float(height)
        for name, values in series:
            if not values[at]:
                continue
            tall = max(_FLOOR, values[at] / top * (height - 1))
            tall = min(tall, base)
            base -= tall
            shapes.append(
                f'<rect class="{name}" x="{at * step:.2f}" y="{base:.2f}" width="{max(0.5, step - _GAP):.2f}" '
                f'height="{tall:.2f}"/>'
            )
    line = f'<path class="axis" d="M0 {height - 0.5}H{width}"/>'
    # Numbers and class names of our own; the label is escaped.
    return Markup(
        f'<svg class="bars" role="img" viewBox="0 0 {width} {height}" preserveAspectRatio="none" '
        f'aria-label="{escape(label)}">{line}{"".join(shapes)}</svg>'
    )


def sparkline(ran: Sequence[int], absorbed: Sequence[int], label: str) -> Markup:
    """Draw what ran in each minute, and the duplicates on top of it. Kept short: a page may have a hundred of them."""
    both = [one + other for one, other in zip(ran, absorbed, strict=True)]
    top = max(both, default=0) or 1
    return Markup(
        f'<svg class="bars" role="img" viewBox="0 0 {len(both)} {_SMALL}" preserveAspectRatio="none" '
        f'aria-label="{escape(label)}"><path class="absorbed" d="{_steps(both, top)}"/>'
        f'<path class="ran" d="{_steps(ran, top)}"/></svg>'
    )


def _steps(values: Sequence[int], top: int) -> str:
    """The outline of the values, from left to right: one step for each change."""
    path, run, before = [f"M0 {_SMALL}"], 0, _SMALL
    for value in values:
        y = _SMALL - (max(_FLOOR, round(value / top * (_SMALL - 1))) if value else 0)
        if y != before:
            path.append(f"h{run}V{y}" if run else f"V{y}")
            run, before = 0, y
        run += 1
    return "".join([*path, f"h{run}V{_SMALL}z"])


_SHAPES: Final = {
    "done": '<circle cx="8" cy="8" r="5.5"/>',
    "running": '<circle class="hollow" cx="8" cy="8" r="5"/><path d="M8 3a5 5 0 0 1 0 10z"/>',
    "abandoned": '<path class="hollow" d="M8 2.5 14 13H2z"/>',
    "unknown": '<path d="M8 1.5 14.5 8 8 14.5 1.5 8z"/><path class="cut" d="M8 4.6v4M8 10.4v1.4"/>',
    "absent": '<circle class="hollow dashed" cx="8" cy="8" r="5"/>',
}


def shape(state: str) -> Markup:
    """Draw the sign of a state. Each has its own shape, so no one needs to see its colour."""
    inner = _SHAPES.get(state, _SHAPES["absent"])
    return Markup(f'<svg class="shape" viewBox="0 0 16 16" aria-hidden="true">{inner}</svg>')
