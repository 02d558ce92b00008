"""How many routes have time series of their own."""

from __future__ import annotations

from typing import Final

MAX_ROUTES: Final = 200
OTHER: Final = "(other)"
"""The route of all events whose route is one too many."""


class LabelLimit:
    """Lets the first routes through, with ``tenants`` pairs of route and tenant, and replaces all later ones."""

    def __init__(self, most: int, tenants: bool) -> None:
        self._most = most
        self._tenants = tenants
        self._known: set[tuple[str, ...]] = set()

    def labels(self, route: str, tenant: str) -> tuple[str, ...]:
        """Return the values of the labels."""
        wanted = (route, tenant) if self._tenants else (route,)
        if wanted not in self._known:
            if len(self._known) >= self._most:  # it is not remembered: it may have been made up for this request
                return (OTHER, "") if self._tenants else (OTHER,)
            self._known.add(wanted)
        return wanted
