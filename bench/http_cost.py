"""What protection costs a request in CPU time, in this process and without sockets: the callable is driven directly."""

from __future__ import annotations

import asyncio
import gc
import io
import itertools
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from time import process_time
from typing import Any, Final, TypeAlias

from bench import http_services, job
from bench.contest import Pace

__all__ = ["BODY", "RequestCost", "costs"]

BODY: Final = b'{"amount": 4200, "currency": "EUR", "to": "DE02120300000000202051"}'
Batch: TypeAlias = Callable[[list[str]], float]
"""Sends a request for each key; takes so many seconds of CPU."""


@dataclass
class RequestCost:
    """Microseconds of CPU a request: in all, and over the unprotected one of the same round (the median of these)."""

    framework: str
    name: str
    job: str
    taken: list[float] = field(default_factory=list)
    over: float | None = None

    @property
    def microseconds(self) -> float:
        return statistics.median(self.taken)

    def as_json(self) -> dict[str, Any]:
        return {
            "framework": self.framework, "contestant": self.name, "job": self.job,
            "microseconds": round(self.microseconds, 2), "best": round(min(self.taken), 2),
            "over_unprotected": None if self.over is None else round(self.over, 2),
        }  # fmt: skip


def costs(pace: Pace, frameworks: tuple[str, ...], progress: Callable[[str], object]) -> list[RequestCost]:
    """All contestants take turns in each round. One caller, memory stores, the garbage collector on."""
    found: list[tuple[RequestCost, Batch]] = []
    numbers = itertools.count()
    with asyncio.Runner() as runner:
        for framework in frameworks:
            for who in http_services.contestants(framework)[0]:
                batch = _batch(framework, http_services.make(framework, who), runner)
                batch([job.known_key(number) for number in range(job.KNOWN)])
                found += [(RequestCost(framework, who, kind), batch) for kind in ("first", "replay")]
        for number in range(pace.rounds + 1):
            progress(f"HTTP in process: round {number + 1} of {pace.rounds + 1}")
            for cost, batch in found:
                keys = [
                    job.fresh_key() if cost.job == "first" else job.known_key(next(numbers)) for _ in range(pace.count)
                ]
                gc.collect(1)  # the last one's leavings; a full one would take longer than the turn
                taken = batch(keys) * 1e6 / len(keys)
                if number:  # the first round warms up
                    cost.taken.append(taken)
    measured = [cost for cost, _ in found]
    bare = {(cost.framework, cost.job): cost for cost in measured if cost.name == http_services.UNPROTECTED}
    for cost in measured:
        if cost.name != http_services.UNPROTECTED:
            rounds = zip(cost.taken, bare[cost.framework, cost.job].taken, strict=True)
            cost.over = statistics.median(ours - theirs for ours, theirs in rounds)
    return measured


def _batch(framework: str, app: Any, runner: asyncio.Runner) -> Batch:
    return _wsgi(app) if framework == "WSGI" else _asgi(app, runner)


def scope_of(key: str) -> dict[str, Any]:
    """As uvicorn makes it."""
    return {
        "type": "http", "asgi": {"version": "3.0", "spec_version": "2.4"}, "http_version": "1.1", "method": "POST",
        "scheme": "http", "path": http_services.PATH, "raw_path": http_services.PATH.encode(), "query_string": b"",
        "root_path": "", "client": ("127.0.0.1", 40000), "server": ("127.0.0.1", 8000), "state": {},
        "headers": [
            (b"host", b"127.0.0.1:8000"), (b"accept", b"*/*"), (b"user-agent", b"bench"),
            (b"content-type", b"application/json"), (b"content-length", str(len(BODY)).encode()),
            (b"idempotency-key", key.encode()),
        ],
    }  # fmt: skip


def _asgi(app: Any, runner: asyncio.Runner) -> Batch:
    async def send_all(keys: list[str]) -> float:
        scopes = [scope_of(key) for key in keys]
        statuses: list[int] = []

        async def receive() -> Any:
            return {"type": "http.request", "body": BODY, "more_body": False}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])

        began = process_time()
        for scope in scopes:
            await app(scope, receive, send)
        taken = process_time() - began
        _check(statuses, keys)
        return taken

    return lambda keys: runner.run(send_all(keys))


def _wsgi(app: Any) -> Batch:
    def send_all(keys: list[str]) -> float:
        environs = [
            {
                "REQUEST_METHOD": "POST", "PATH_INFO": http_services.PATH, "QUERY_STRING": "", "SCRIPT_NAME": "",
                "CONTENT_TYPE": "application/json", "CONTENT_LENGTH": str(len(BODY)), "SERVER_PROTOCOL": "HTTP/1.1",
                "HTTP_HOST": "127.0.0.1:8000", "HTTP_ACCEPT": "*/*", "HTTP_USER_AGENT": "bench",
                "HTTP_IDEMPOTENCY_KEY": key, "wsgi.url_scheme": "http", "wsgi.input": io.BytesIO(BODY),
            }
            for key in keys
        ]  # fmt: skip
        statuses: list[int] = []

        def start_response(status: str, headers: Any, exc_info: Any = None) -> Any:
            statuses.append(int(status[:3]))

        began = process_time()
        for environ in environs:
            body = app(environ, start_response)
            for _ in body:
                pass
            if hasattr(body, "close"):
                body.close()
        taken = process_time() - began
        _check(statuses, keys)
        return taken

    return send_all


def _check(statuses: list[int], keys: list[str]) -> None:
    """A contestant that refuses is no contestant."""
    if statuses != [200] * len(keys):
        raise RuntimeError(f"{len(keys)} requests were answered {sorted(set(statuses))}, {len(statuses)} times")
