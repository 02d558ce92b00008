"""A console over a store in memory, and a client that asks it without a socket."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from semel import MemoryStore, Semel
from semel.console import Access, Console
from semel.trail import Trail

TOKEN = "a token that nobody guesses"


class Asking:
    """A client of a console. It keeps cookies, as a browser does."""

    def __init__(self, console: Any, base: str = "http://console.test") -> None:
        self._runner = asyncio.Runner()
        transport = httpx.ASGITransport(app=console, client=("127.0.0.1", 5))
        self.client = httpx.AsyncClient(transport=transport, base_url=base)
        self._console = console

    def get(self, path: str, **headers: str) -> httpx.Response:
        lines = {name.replace("_", "-"): value for name, value in headers.items()}
        return self._runner.run(self.client.get(path, headers=lines))

    def post(self, path: str, data: dict[str, str] | None = None, **headers: str) -> httpx.Response:
        lines = {name.replace("_", "-"): value for name, value in headers.items()}
        return self._runner.run(self.client.post(path, data=data, headers=lines))

    def form(self, path: str = "/") -> str:
        """The value that the forms of a page carry."""
        page = self.get(path).text
        return page.partition('name="form" value="')[2].partition('"')[0]

    def sign_in(self, token: str = TOKEN) -> httpx.Response:
        return self.post("/sign-in", {"token": token, "form": self.form("/sign-in")})

    def run(self, work: Any) -> Any:
        return self._runner.run(work)

    def close(self) -> None:
        self._runner.run(self.client.aclose())
        self._runner.run(self._console.close())
        self._runner.close()


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def guard(store: MemoryStore) -> Iterator[Semel]:
    with Trail(store, service="payments", interval=0.01) as trail, Semel(store, on_event=trail) as guard:
        yield guard


@pytest.fixture
def anybody(guard: Semel) -> Iterator[Asking]:
    """Of a console with a token: nobody has signed in."""
    asking = Asking(Console({"shop": guard}, token=TOKEN))
    yield asking
    asking.close()


@pytest.fixture
def operator(anybody: Asking) -> Asking:
    """Of the same console, signed in."""
    assert anybody.sign_in().status_code == 303
    return anybody


@pytest.fixture
def reader(guard: Semel) -> Iterator[Asking]:
    """Of a console whose application lets somebody look at everything, and not act."""
    asking = Asking(Console({"shop": guard}, allow=lambda request: Access(who="ann", show_keys=True, show_bodies=True)))
    yield asking
    asking.close()
