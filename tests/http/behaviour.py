"""What the handlers of all test services do: as their request's JSON body says, and written down in a ledger.

``{"status": 201, "headers": [["Link", "…"]], "text": "…", "size": 5000, "chunks": 3, "gate": "g", "raise": "before"}``
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import threading
import uuid
from dataclasses import dataclass, field
from typing import Any

from semel import AsyncSemel, Codec, KeyRing, Policy, Wait
from semel.core.encoding.snapshot import StoredResponse
from semel.core.ops import Op
from semel.errors import StoreUnavailable
from semel.http.contract.responses import RESPONSES
from semel.http.contract.rules import Idempotent, idempotent

RULES: dict[str, dict[str, Any]] = {
    "/plain": {},
    "/other": {},
    "/optional": {"required": False},
    "/strict": {"key_mode": "strict"},
    "/verbatim": {"key_mode": "raw"},
    "/uuid": {"key_format": "uuid"},
    "/wide-a": {"scope": "tenant"},
    "/wide-b": {"scope": "tenant"},
    "/reused-409": {"reused_status": 409},
    "/reused-400": {"reused_status": 400},
    "/external": {"external_effects": True},
    "/once": {"guarantee": "at_most_once"},
    "/wait": {"on_duplicate": Wait("20s")},
    "/short": {"ttl": "50ms"},
    "/no-return": {"ttl": "50ms", "reject_expired_for": "1h"},
    "/capped": {"max_stored_body": 1000},
    "/secret": {"keep_body": False},
    "/canonical": {"canonical_json": True},
    "/only": {"include": ("text",)},
    "/without": {"exclude": ("note",)},
    "/account": {"fingerprint_headers": ("X-Account",)},
    "/open": {"on_store_error": "open"},
    "/leased": {"lease": "2s"},
    "/abandoned": {"lease": "500ms"},
    "/rejected": {"lease": "500ms", "on_abandoned": "reject"},
    "/marked": {"replay_marker": "x-again"},
    "/raw": {},
    "/bounded": {"max_request_body": 5000},
    "/parsed": {"max_request_body": 5000},
}
"""The settings of each route, by its path. All are for POST."""

UNPARSED = ("/raw", "/bounded")
"""Routes whose handlers read the body themselves, and answer with its length."""


def table() -> dict[str, Idempotent]:
    return {f"POST {path}": idempotent(**settings) for path, settings in RULES.items()} | {
        "PUT /plain": idempotent(),
        "DELETE /plain": idempotent(),
    }


class Gate:
    """Where a handler waits until the test lets it go; the test can wait until it has come."""

    def __init__(self) -> None:
        self.came = asyncio.Event()
        self.open = asyncio.Event()
        self.thread_open = threading.Event()


@dataclass
class Reply:
    """An answer, for each framework to send in its own way."""

    status: int = 201
    headers: list[tuple[str, str]] = field(default_factory=list)
    chunks: list[bytes] = field(default_factory=list)
    error_after: bool = False
    background: str = ""


class Switchable:
    """A store that can be switched off."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.wakes, self.counts, self.resumes, self.lists = store.wakes, store.counts, store.resumes, store.lists
        self.trails = store.trails
        self.adopt, self.accept = store.adopt, store.accept
        self.down = False

    async def execute(self, op: Op[Any]) -> Any:
        if self.down:
            raise StoreUnavailable("connection refused: db.internal:5432 (password hunter2)")
        return await self._store.execute(op)

    async def execute_many(self, ops: Any) -> list[Any]:
        return [StoreUnavailable("down") for _ in ops] if self.down else await self._store.execute_many(ops)

    async def wait(self, id: bytes, seconds: float) -> None:
        await self._store.wait(id, seconds)

    def open(self) -> None: ...

    async def close(self) -> None:
        await self._store.close()


class Service:
    """What a test service has beside its framework: guard, gates, ledger."""

    def __init__(self) -> None:
        self.ledger = os.environ["LEDGER"]
        self.events: list[Any] = []
        self.store = Switchable(_store(os.environ.get("STORE", "memory")))
        settings: dict[str, Any] = {"policy": Policy(completion_timeout="100ms"), "on_event": self.events.append}
        if os.environ.get("SEALED"):
            settings["codec"] = Codec(cipher=KeyRing({"k1": base64.b64decode(os.environ["SEALED"])}))
            settings["readable_keys"] = False
            settings["secret"] = b"a secret of sixteen bytes or more"
        self.guard = AsyncSemel(self.store, **settings)
        self.gates: dict[str, Gate] = {}
        self.loop: asyncio.AbstractEventLoop | None = None

    def gate(self, name: str) -> Gate:
        return self.gates.setdefault(name, Gate())

    def write(self, line: str) -> None:
        with open(self.ledger, "a") as file:
            file.write(line + "\n")

    async def act(self, path: str, do: dict[str, Any]) -> Reply:
        self.write(f"{path} {do.get('ledger', '')}")
        if "gate" in do:
            gate = self.gate(do["gate"])
            gate.came.set()
            try:
                await gate.open.wait()
            except asyncio.CancelledError:
                self.write(f"cancelled {do.get('ledger', '')}")
                raise
        return self._reply(do)

    def act_in_thread(self, path: str, do: dict[str, Any]) -> Reply:
        self.write(f"{path} {do.get('ledger', '')}")
        if "gate" in do:
            assert self.loop is not None
            gate = self.gate(do["gate"])
            self.loop.call_soon_threadsafe(gate.came.set)
            gate.thread_open.wait()
        return self._reply(do)

    def _reply(self, do: dict[str, Any]) -> Reply:
        if do.get("raise") == "before":
            raise RuntimeError("the handler broke, and knows hunter2")
        status = do.get("status", 201)
        headers = [(name, value) for name, value in do.get("headers", [])]
        if "size" in do:
            body = os.urandom(do["size"])
            headers.append(("Content-Type", "application/octet-stream"))
        elif "text" in do:
            body = do["text"].encode()
            headers.append(("Content-Type", "text/plain; charset=utf-8"))
        else:
            body = json.dumps({"run": str(uuid.uuid4())}).encode()
            headers.append(("Content-Type", "application/json"))
        if status == 204:
            body, headers = b"", [line for line in headers if line[0] != "Content-Type"]
        count = do.get("chunks", 1)
        step = max(1, -(-len(body) // count))
        chunks = [body[at : at + step] for at in range(0, len(body), step)] or [b""]
        return Reply(status, headers, chunks, do.get("raise") == "after", do.get("background", ""))


def _store(url: str) -> Any:
    if url == "memory":
        from semel import AsyncMemoryStore

        return AsyncMemoryStore()
    if url.startswith("postgresql:"):
        from semel import AsyncPostgresStore

        return AsyncPostgresStore(url)
    from semel import AsyncSQLiteStore

    return AsyncSQLiteStore(url, synchronous="normal")


class Admin:
    """The test's own door into a service: ``POST /admin/…``, outside of everything that is tested."""

    def __init__(self, app: Any, service: Service) -> None:
        self.app = app
        self.service = service

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.service.loop = asyncio.get_running_loop()
        if scope["type"] != "http" or not scope["path"].startswith("/admin/"):
            await self.app(scope, receive, send)
            return
        message = await receive()
        do = json.loads(message.get("body") or b"{}")
        answer = await getattr(self, scope["path"].removeprefix("/admin/"))(**do)
        body = json.dumps(answer).encode()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body})

    async def came(self, gate: str) -> None:
        await self.service.gate(gate).came.wait()

    async def open(self, gate: str) -> None:
        self.service.gate(gate).open.set()
        self.service.gate(gate).thread_open.set()

    async def switch(self, down: bool) -> None:
        self.service.store.down = down

    async def events(self) -> list[list[str]]:
        told, self.service.events[:] = list(self.service.events), []
        return [[event.name, event.operation, event.tenant, event.key] for event in told]

    async def record(self, operation: str, key: str, tenant: str = "alice") -> dict[str, Any] | None:
        record = await self.service.guard.lookup(operation, key, tenant=tenant)
        if record is None:
            return None
        return {
            "state": record.state.name,
            "key": record.key,
            "fingerprint": record.fingerprint.hex(),
            "snapshot": base64.b64encode(record.snapshot or b"").decode(),
            "attempt": record.attempt,
        }

    async def steal(self, operation: str, key: str, text: str | None = None) -> None:
        """Take a running operation over, as another process would after a pause; and finish it, or leave it free."""
        guard = self.service.guard
        record = await guard.lookup(operation, key, tenant="alice")
        assert record is not None
        await guard.release(operation, key, tenant="alice", force=True)
        if text is not None:
            other = AsyncSemel(self.service.store)
            call = other.make_call(operation, key, "alice", record.fingerprint, Policy(), serializer=RESPONSES)
            attempt = await other.begin(call)
            await attempt.complete(StoredResponse(202, [], text.encode()))  # type: ignore[union-attr]
