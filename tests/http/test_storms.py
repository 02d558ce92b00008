"""Many equal requests to many processes, and processes that die in the middle."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.http.conftest import Served, shown

pytestmark = pytest.mark.process

STORM = 50


def storm(servers: list[Served], path: str, key: str, do: dict[str, Any]) -> list[httpx.Response]:
    async def all_at_once() -> list[httpx.Response]:
        async with httpx.AsyncClient(timeout=60, limits=httpx.Limits(max_connections=STORM)) as client:
            headers = {"Idempotency-Key": key, "Authorization": "Bearer alice"}
            urls = [servers[number % len(servers)].url + path for number in range(STORM)]
            return await asyncio.gather(*(client.post(url, json=do, headers=headers) for url in urls))

    return asyncio.run(all_at_once())


def check(servers: list[Served], path: str, key: str, word: str) -> None:
    for server in servers:
        assert server.post("/undeclared", None).status_code == 200  # they are up
    answers = storm(servers, path, key, {"ledger": word})
    statuses = Counter(answer.status_code for answer in answers)
    assert set(statuses) <= {201, 409}, statuses
    assert statuses[201] >= 1
    if path == "/wait":
        assert statuses[201] == STORM
    bodies = {answer.content for answer in answers if answer.status_code == 201}
    assert len(bodies) == 1
    assert sum("idempotent-replayed" not in answer.headers for answer in answers if answer.status_code == 201) == 1
    assert [server.post(path, key, {"ledger": word}).content for server in servers] == [*bodies] * len(servers)
    assert servers[0].runs(word) == 1


@pytest.mark.parametrize(
    ("kind", "path"),
    [("fastapi_sync", "/wait"), ("litestar", "/plain")],  # in threads, and in a loop; below there is the middleware
)
def test_fifty_equal_requests_to_two_processes_run_once(
    own: Callable[..., Served], tmp_path: Path, kind: str, path: str, key: str, word: str
) -> None:
    shared = {"STORE": str(tmp_path / "semel.db"), "LEDGER": str(tmp_path / "ledger")}
    check([own(kind, **shared), own(kind, **shared)], path, key, word)


def test_fifty_equal_requests_to_two_processes_run_once_on_postgres(
    own: Callable[..., Served], tmp_path: Path, postgres_url: str, key: str, word: str
) -> None:
    from semel.cli import main

    main(["migrate", postgres_url])
    shared = {"STORE": postgres_url, "LEDGER": str(tmp_path / "ledger")}
    check([own("fastapi", **shared), own("starlette", **shared)], "/plain", key, word)


@pytest.mark.faults
@pytest.mark.parametrize(("kind", "path", "status"), [("asgi", "/abandoned", 201), ("fastapi_sync", "/rejected", 500)])
def test_a_process_killed_in_the_middle_leaves_what_the_policy_says(
    own: Callable[..., Served], tmp_path: Path, kind: str, path: str, status: int, key: str, word: str
) -> None:
    server = own(kind, STORE=str(tmp_path / "semel.db"))
    do = {"ledger": word, "gate": key}

    def first() -> None:
        with pytest.raises(httpx.TransportError):
            server.post(path, key, do)

    thread = threading.Thread(target=first)
    thread.start()
    server.admin("came", gate=key)
    server.kill()
    thread.join()
    server.start()
    server.admin("open", gate=key)
    answer = server.post(path, key, do)
    while answer.status_code == 409:  # until the lease of the dead has ended
        threading.Event().wait(0.05)
        answer = server.post(path, key, do)
    assert answer.status_code == status
    if status == 500:
        assert shown(answer)["code"] == "idempotency_outcome_unknown"
        assert shown(answer)["retryable"] is False
        assert server.runs(word) == 1
    else:
        assert server.runs(word) == 2
        assert server.post(path, key, do).content == answer.content
