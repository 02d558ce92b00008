"""A claim at the edge is made before its flow begins, because a replay needs no flow. It must answer as the flow does.

Random histories are sent to two services that differ in nothing else: every answer, every event and every run of the
handler must be the same.
"""

import asyncio
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from semel import AsyncMemoryStore, AsyncSemel, InProgress, Quota, StoreUnavailable
from semel.core.ops import Claim
from semel.http.asgi import ASGIMiddleware, idempotent
from semel.http.contract.rules import Idempotent

LIMIT = 8


class Moody(AsyncMemoryStore):
    """A store that fails when it is told to, and holds a claim back until it is let go."""

    def __init__(self) -> None:
        super().__init__(clock=lambda: 1000.0)
        self.failures: list[Exception] = []
        self.slow: asyncio.Event | None = None

    async def execute(self, op: Any) -> Any:
        if isinstance(op, Claim):
            if self.slow is not None:
                gate, self.slow = self.slow, None
                await gate.wait()
            if self.failures:
                raise self.failures.pop()
        return await super().execute(op)


class Service:
    """One middleware, its application, and all that can be seen of both."""

    def __init__(self, rule: Idempotent, *, early: bool, tenants: str, events: bool, quota: bool) -> None:
        self.seen: list[Any] = []
        self.runs: list[bytes] = []
        self.held: list[asyncio.Event] = []
        self.tasks: list[asyncio.Task[None]] = []
        self.store = Moody()
        self.guard = AsyncSemel(
            self.store,
            tenant="" if tenants != "none" else "all",
            on_event=self.note if events else None,
            quota=Quota(live_keys=2) if quota else None,
            sweep_every=None,
        )
        tenant: Any = {"none": None, "plain": self.tenant, "async": self.async_tenant}[tenants]
        self.middleware = ASGIMiddleware(
            self.application, guard=self.guard, tenant=tenant, routes={"POST /pay": rule}, max_request_body=LIMIT
        )
        self.middleware.rule(rule).__dict__["claims_early"] = early

    def note(self, event: Any) -> None:
        """Note an event without its spans of time, which are real."""
        self.seen.append((event.name, event.operation, event.tenant, event.key, event.route))

    def tenant(self, scope: Any) -> Any:
        if scope["who"] == "refused":
            raise InProgress("not now", retry_after=1.0)
        return scope["who"]

    async def async_tenant(self, scope: Any) -> Any:
        await asyncio.sleep(0)
        return self.tenant(scope)

    async def application(self, scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        self.runs.append(body)
        status, held = scope["answers"]
        if held:
            self.held.append(asyncio.Event())
            await self.held[-1].wait()
        if status == 0:
            raise ValueError("the handler fails")
        lines = [(b"content-type", b"text/plain"), (b"set-cookie", b"a=1"), (b"etag", b'"%d"' % len(self.runs))]
        await send({"type": "http.response.start", "status": status, "headers": lines})
        await send({"type": "http.response.body", "body": b"%d" % len(self.runs)})

    async def request(self, number: int, request: dict[str, Any]) -> None:
        messages = list(request["messages"])

        async def receive() -> Any:
            return dict(messages.pop(0)) if messages else {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            self.seen.append((number, message))

        scope = {"type": "http", "method": "POST", "path": "/pay", "query_string": b"", **request}
        try:
            await self.middleware(scope, receive, send)
        except (Exception, asyncio.CancelledError) as error:
            self.seen.append((number, type(error), str(error)))
        assert "semel.claimed" not in scope or request["answers"][1]

    async def take(self, number: int, step: Any) -> None:
        kind, what = step
        if kind == "request":
            self.tasks.append(asyncio.ensure_future(self.request(number, what)))
        elif kind == "fail":
            self.store.failures.append(StoreUnavailable("the store is away"))
        elif kind == "slow":
            self.store.slow = asyncio.Event()
            self.held.append(self.store.slow)
        elif kind == "leave" and self.tasks:
            self.tasks[-1].cancel()
        elif kind == "go on":
            self.let_go()
        await settle()

    def let_go(self) -> None:
        for event in self.held:
            event.set()

    async def play(self, history: list[Any]) -> tuple[Any, ...]:
        for number, step in enumerate(history):
            await self.take(number, step)
        for _ in range(3 + len(history)):  # each may let another one begin
            self.let_go()
            await settle()
        assert all(task.done() for task in (*self.tasks, *self.middleware._left)), "a request waits for ever"
        left = sorted(row[:2] + row[5:] for row in self.store._records.rows.values())  # without token and nonce
        await self.guard.close()
        return self.seen, self.runs, left, len(self.guard.driver.flights.by_id), len(self.guard.driver.keeper.leases)


async def settle() -> None:
    """Let everything run that can."""
    for _ in range(25):
        await asyncio.sleep(0)


def message(body: bytes, more: bool = False) -> dict[str, Any]:
    return {"type": "http.request", "body": body, "more_body": more}


KEYS = st.sampled_from([b"a", b"a", b"a", b"b", b'"a"', b'"b c"', b"a,b", b"", b"\xff", None])
BODIES = st.sampled_from(
    [
        [message(b"x")],
        [message(b"x")],
        [message(b"")],
        [message(b'{"a":1}')],
        [message(b'{"a": 1}')],
        [message(b"--b\r\nx")],
        [message(b"--c\r\nx")],
        [message(b"x", True), message(b"y")],
        [message(b"x" * (LIMIT + 1))],
        [message(b"x", True), message(b"x" * LIMIT)],
        [message(b"x", True)],
        [],
    ]
)
KINDS = st.sampled_from(
    [None, None, b"application/json", b"multipart/form-data; boundary=b", b"multipart/form-data; boundary=c"]
)
REQUESTS = st.fixed_dictionaries(
    {
        "headers": st.tuples(KEYS, st.booleans(), st.sampled_from([None, b"1", b"99"]), st.booleans(), KINDS).map(
            lambda drawn: [
                *([] if drawn[0] is None else [(b"idempotency-key", drawn[0])]),
                *([(b"idempotency-key", b"a")] if drawn[1] and drawn[3] else []),
                *([] if drawn[2] is None else [(b"content-length", drawn[2])]),
                *([(b"origin", b"https://shop.example")] if drawn[3] else []),
                *([] if drawn[4] is None else [(b"content-type", drawn[4])]),
                *([(b"if-match", b"*")] if drawn[1] else []),
            ]
        ),
        "messages": BODIES,
        "who": st.sampled_from(["alice", "alice", "alice", "bob", "", None, 7, "refused"]),
        "answers": st.tuples(st.sampled_from([200, 200, 201, 204, 400, 409, 500, 0]), st.booleans()),
    }
)
PAID = {
    "headers": [(b"idempotency-key", b"a")],
    "messages": [message(b"x")],
    "who": "alice",
    "answers": (200, False),
}
REPEATED = [("request", PAID), ("request", PAID)]
STEPS = st.one_of(
    st.tuples(st.just("request"), REQUESTS),
    st.tuples(st.just("request"), REQUESTS),
    st.tuples(st.just("request"), REQUESTS),
    st.tuples(st.sampled_from(["fail", "slow", "leave", "go on"]), st.none()),
)
RULES = st.sampled_from(
    [
        {},
        {},
        {"canonical_json": True},
        {"compare_parts": True},
        {"fingerprint_headers": ("Origin",)},
        {"required": False},
        {"scope": "tenant"},
        {"key_mode": "strict"},
        {"external_effects": True},
        {"on_store_error": "open"},
        {"replay_marker": "x-again", "reused_status": 409},
        {"ttl": 60, "reject_expired_for": 600},
        {"max_request_body": 2},
        {"max_stored_body": 0},
    ]
)


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("CRITICAL", "semel")


@settings(max_examples=settings.default.max_examples, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    history=st.lists(STEPS, min_size=2, max_size=10),
    rule=RULES,
    tenants=st.sampled_from(["plain", "plain", "async", "none"]),
    events=st.booleans(),
    quota=st.sampled_from([False, False, True]),
)
@example([("slow", None), ("request", PAID), ("slow", None), ("leave", None), *REPEATED], {}, "plain", True, False)
@example([("request", PAID), ("fail", None), *REPEATED], {}, "plain", True, False)
def test_an_early_claim_answers_as_the_flow_does(
    history: list[Any], rule: dict[str, Any], tenants: str, events: bool, quota: bool
) -> None:
    def play(early: bool) -> tuple[Any, ...]:
        service = Service(idempotent(**rule), early=early, tenants=tenants, events=events, quota=quota)
        return asyncio.run(service.play(history))

    assert play(early=True) == play(early=False)
