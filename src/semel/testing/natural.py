"""Test a route declared ``@natural()``: a request sent twice succeeds twice, and the second one changes nothing.

::

    def test_putting_a_customer_twice():
        assert_natural(
            send=lambda: client.put("/customers/7", json={"name": "Ada"}),
            observe=lambda: client.get("/customers/7").json(),
        )

The declaration is a promise that Semel cannot check at run time, so a service tests it. Any HTTP client works whose
response has a ``status_code`` or a ``status``.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

__all__ = ["NotNatural", "assert_natural", "assert_natural_async"]


class NotNatural(AssertionError):
    """A repeated request failed, or changed the observed state."""


def assert_natural(send: Callable[[], Any], observe: Callable[[], Any], *, times: int = 2) -> None:
    """Send the same request ``times`` times. Raises NotNatural if one fails, or if the observed state changes.

    :param send: sends the request and returns the response.
    :param observe: returns the state that the route changes, such as rows, a GET of the resource or a count of e-mails.
    """
    _check_success(send(), 1)
    state = observe()
    for number in range(2, times + 1):
        _check_success(send(), number)
        _check_unchanged(state, observe(), number)


async def assert_natural_async(
    send: Callable[[], Awaitable[Any]], observe: Callable[[], Awaitable[Any]], *, times: int = 2
) -> None:
    """Async version of ``assert_natural``."""
    _check_success(await send(), 1)
    state = await observe()
    for number in range(2, times + 1):
        _check_success(await send(), number)
        _check_unchanged(state, await observe(), number)


def _check_success(response: Any, number: int) -> None:
    status = getattr(response, "status_code", None)
    if status is None:
        status = getattr(response, "status", None)
    if not isinstance(status, int):
        raise TypeError(f"send() returned {response!r}, which has no integer status_code or status")
    if not 200 <= status < 300:
        raise NotNatural(f"request {number} got status {status}: a natural route succeeds every time")


def _check_unchanged(state: Any, now: Any, number: int) -> None:
    if now != state:
        raise NotNatural(f"request {number} changed the observed state from {state!r} to {now!r}")
