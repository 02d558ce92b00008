"""An answer that was let through because it is too large, and then breaks: the client must not take it for whole."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
import uvicorn
from fastapi import FastAPI
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from starlette.middleware.gzip import GZipMiddleware
from starlette.responses import StreamingResponse

from semel import AsyncSemel, AsyncSQLiteStore, TransactionConflict
from semel.http.fastapi import idempotent, install
from tests.http.asking import whose


async def served(app: Any, *keys: str) -> list[httpx.Response | httpx.RemoteProtocolError]:
    """What a client is told by a real server, for each key."""
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    listening.listen()  # a client waits until the server has started
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off", ws="none"))
    serving = asyncio.ensure_future(server.serve([listening]))
    told: list[httpx.Response | httpx.RemoteProtocolError] = []
    try:
        async with asyncio.timeout(20), httpx.AsyncClient() as client:
            url = f"http://127.0.0.1:{listening.getsockname()[1]}/report"
            for key in keys:
                try:
                    told.append(await client.post(url, headers={"Idempotency-Key": key}))
                except httpx.RemoteProtocolError as error:
                    told.append(error)
    finally:
        server.should_exit = True
        await serving
        listening.close()
    return told


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
@pytest.mark.parametrize("why", ["raised", "remembered", "conflict"])
def test_an_answer_that_breaks_is_cut_off(tmp_path: Path, why: str, packed: bool) -> None:
    path = str(tmp_path / "shop.db")
    engine = create_async_engine(f"sqlite+aiosqlite:///{path}", poolclass=sa.NullPool)
    settings: dict[str, dict[str, Any]] = {
        "raised": {},
        "remembered": {"external_effects": True},
        "conflict": {"connection": async_sessionmaker(engine)},
    }

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(3):
            yield b"0123456789" * 100
        raise TransactionConflict("it met another one") if why == "conflict" else RuntimeError("of the rest")

    async def main() -> list[Any]:
        async with AsyncSemel(AsyncSQLiteStore(path), sweep_every=None) as guard:
            app = FastAPI()
            install(app, guard=guard, tenant=whose)
            if packed:
                app.add_middleware(GZipMiddleware)

            @app.post("/report")
            @idempotent(max_stored_body=100, **settings[why])
            async def report() -> StreamingResponse:
                return StreamingResponse(chunks())

            try:
                return await served(app, "k1", "k1")
            finally:
                await engine.dispose()

    first, second = asyncio.run(main())
    assert isinstance(first, httpx.RemoteProtocolError)
    if why == "remembered":
        assert (second.status_code, second.headers["idempotent-replayed"]) == (500, "true")
    else:
        assert isinstance(second, httpx.RemoteProtocolError), "the key was free"
