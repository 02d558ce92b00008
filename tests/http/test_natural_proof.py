"""The proof of natural routes: it passes those that are, and fails each way of not being one."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, HTTPException

from semel import AsyncMemoryStore, AsyncSemel
from semel.http.fastapi import install, natural
from semel.testing.natural import NotNatural, assert_natural, assert_natural_async


class Client:
    """Asks an application in this process."""

    def __init__(self, app: Any) -> None:
        self._transport = httpx.ASGITransport(app=app)

    def request(self, method: str, path: str) -> httpx.Response:
        async def ask() -> httpx.Response:
            async with httpx.AsyncClient(transport=self._transport, base_url="http://test") as client:
                return await client.request(method, path)

        return asyncio.run(ask())


def service() -> tuple[Client, dict[str, int]]:
    app = FastAPI()
    install(app, guard=AsyncSemel(AsyncMemoryStore()), tenant=lambda request: "alice")
    rows: dict[str, int] = {"here": 1}

    @app.put("/set/{id}")
    @natural()
    async def put(id: str) -> None:
        rows[id] = 5

    @app.put("/grow/{id}")
    @natural()
    async def grow(id: str) -> None:
        rows[id] = rows.get(id, 0) + 5

    @app.delete("/gone/{id}", status_code=204)
    @natural()
    async def delete(id: str) -> None:
        if rows.pop(id, None) is None:
            raise HTTPException(404)

    @app.delete("/strict/{id}", status_code=204)
    @natural(absent=frozenset())
    async def strict(id: str) -> None:
        if rows.pop(id, None) is None:
            raise HTTPException(404)

    return Client(app), rows


@pytest.mark.parametrize("path", ["put /set/x", "delete /gone/here", "delete /gone/never-there"])
def test_natural_routes_pass(path: str) -> None:
    client, rows = service()
    method, path = path.split()
    assert_natural(lambda: client.request(method, path), lambda: dict(rows), times=3)


@pytest.mark.parametrize(
    ("path", "words"), [("put /grow/x", "changed the observed state"), ("delete /strict/here", "got status 404")]
)
def test_routes_that_only_say_so_fail(path: str, words: str) -> None:
    client, rows = service()
    method, path = path.split()
    with pytest.raises(NotNatural, match=words):
        assert_natural(lambda: client.request(method, path), lambda: dict(rows))


def test_the_async_form_judges_alike() -> None:
    state = [0]

    async def send() -> Any:
        state[0] += grows
        return SimpleNamespace(status=204)

    async def observe() -> list[int]:
        return list(state)

    grows = 0
    asyncio.run(assert_natural_async(send, observe))
    grows = 1
    with pytest.raises(NotNatural, match=r"from \[1\] to \[2\]"):
        asyncio.run(assert_natural_async(send, observe))


def test_an_answer_without_a_status_is_a_mistake_in_the_test() -> None:
    with pytest.raises(TypeError, match="status_code"):
        assert_natural(lambda: "ok", lambda: 1)
