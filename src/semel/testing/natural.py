"""Prove that a route declared ``@natural()`` is: sent twice, it succeeds twice, and the second call changes nothing.

::

    def test_putting_a_customer_twice():
        assert_natural(
            send=lambda: client.put("/customers/7", json={"name": "Ada"}),
            observe=lambda: client.get("/customers/7").json(),
        )

The declaration is a promise; this is how a service keeps it honest. Works with any client: an answer has a
``status_code`` or a ``status``.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

__all__ = ["NotNatural", "assert_natural", "assert_natural_async"]


class NotNatural(AssertionError):
    """A second call failed, or changed something."""


def assert_natural(send: Callable[[], Any], observe: Callable[[], Any], *, times: int = 2) -> None:
    """Send the same request ``times`` times; raise NotNatural unless all succeed and what is observed stays the same.

    :param send: sends the request and gives back its answer.
    :param observe: gives back the state that the route is about: rows, a GET of the resource, a count of e-mails.
    """
    _succeeded(send(), 1)
    state = observe()
    for number in range(2, times + 1):
        _succeeded(send(), number)
        _unchanged(state, observe(), number)


async def assert_natural_async(
    send: Callable[[], Awaitable[Any]], observe: Callable[[], Awaitable[Any]], *, times: int = 2
) -> None:
    """The same, awaited."""
    _succeeded(await send(), 1)
    state = await observe()
    for number in range(2, times + 1):
        _succeeded(await send(), number)
        _unchanged(state, await observe(), number)


def _succeeded(answer: Any, number: int) -> None:
    status = getattr(answer, "status_code", None)
    if status is None:
        status = getattr(answer, "status", None)
    if not isinstance(status, int):
        raise TypeError(f"send() gave {answer!r}: an answer has a status_code, or a status, that is a number")
    if not 200 <= status < 300:
        raise NotNatural(f"call {number} was answered {status}: a natural route succeeds however often it is asked")


def _unchanged(state: Any, now: Any, number: int) -> None:
    if now != state:
        raise NotNatural(f"call {number} changed what is observed, from {state!r} to {now!r}")
