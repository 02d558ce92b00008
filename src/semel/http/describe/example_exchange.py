"""An example of the contract at work on one route: a few requests, answered by the real middleware.

The route's rule, key format, headers and errors are its own; only what its handler would say is made up.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from http import HTTPStatus
from typing import Any, Final

from semel.core.keys import header_value
from semel.core.policy import Policy
from semel.core.values import value
from semel.http.contract.conditional import etag
from semel.http.contract.inventory import Endpoint
from semel.http.contract.rules import Conditional, Idempotent
from semel.http.describe.paths import example_path
from semel.http.describe.refusals import example_key
from semel.http.wsgi.middleware import WSGIMiddleware
from semel.stores.guard import Semel
from semel.stores.memory import MemoryStore

__all__ = ["Step", "chosen", "example_exchange"]

_SENT: Final = {"amount": 10}
_OTHER: Final = {"amount": 99}
_MADE: Final = b'{"id": 42, "amount": 10}'


@value
class Step:
    """A request and its answer, as they go over the wire."""

    title: str
    request: str
    answer: str


def chosen(endpoints: Iterable[Endpoint]) -> Endpoint | None:
    """The route to show: one that needs a key, if there is one whose key we can make up."""
    fit = [each for each in endpoints if isinstance(each.rule, Idempotent) and example_key(each.rule) is not None]
    return min(fit, key=lambda each: not isinstance(each.rule, Idempotent) or not each.rule.required, default=None)


def example_exchange(endpoint: Endpoint, policy: Policy | None = None, docs: str | None = None) -> list[Step]:
    """First answer, a duplicate that comes too early, the replay, and the same key with another request."""
    assert isinstance(endpoint.rule, Idempotent)
    rule = endpoint.rule.under(policy or Policy())
    # Nobody is there to be waited for, nothing expires before the page is written, and there is no database.
    rule = replace(
        rule, policy=rule.policy.replace(on_duplicate="raise", ttl="24h"), connection=None, connection_parameter=None
    )
    early: list[Step] = []

    def handler(environ: Any, start_response: Callable[..., Any]) -> Iterable[bytes]:
        early.append(ask("A retry that comes while the first request is still being processed", _SENT))
        lines = [("Content-Type", "application/json"), ("Content-Length", str(len(_MADE)))]
        start_response("201 Created" if endpoint.method == "POST" else "200 OK", lines)
        return [_MADE]

    def ask(title: str, body: dict[str, int]) -> Step:
        return _asked(protected, title, endpoint, rule, json.dumps(body).encode())

    with Semel(MemoryStore(), tenant="example", sweep_every=None) as guard:
        routes = {f"{endpoint.method} {example_path(endpoint.path)}": rule}
        protected = WSGIMiddleware(handler, guard=guard, routes=routes, docs=docs)
        steps = [ask("The first request", _SENT), *early]
        steps.append(ask("A retry after that: the same key, the same request", _SENT))
        if not rule.include and "amount" not in rule.exclude:  # else it may count as the same
            steps.append(ask("The same key, another request", _OTHER))
        return steps


def _asked(app: Any, title: str, endpoint: Endpoint, rule: Idempotent, body: bytes) -> Step:
    lines = [("Host", "api.example"), ("Content-Type", "application/json"), ("Content-Length", str(len(body)))]
    key = example_key(rule)
    if key is not None:
        lines.append(("Idempotency-Key", header_value(key, quote=rule.key_mode == "strict")))
    if isinstance(rule, Conditional):
        lines.append(("If-Match", etag(7)))
    path = example_path(endpoint.path)
    environ = {
        "REQUEST_METHOD": endpoint.method, "SCRIPT_NAME": "", "PATH_INFO": path, "QUERY_STRING": "",
        "SERVER_NAME": "api.example", "SERVER_PORT": "443", "SERVER_PROTOCOL": "HTTP/1.1", "wsgi.version": (1, 0),
        "wsgi.url_scheme": "https", "wsgi.input": io.BytesIO(body), "wsgi.errors": io.StringIO(),
        "wsgi.multithread": False, "wsgi.multiprocess": False, "wsgi.run_once": False,
    }  # fmt: skip
    for name, text in lines:
        field = name.upper().replace("-", "_")
        environ[field if field in ("CONTENT_TYPE", "CONTENT_LENGTH") else f"HTTP_{field}"] = text
    begun: list[Any] = []

    def start_response(status: str, headers: list[tuple[str, str]], exc_info: Any = None) -> Callable[[bytes], None]:
        begun[:] = [status, headers]
        return lambda data: None

    said = app(environ, start_response)
    try:
        answer = b"".join(said)
    finally:
        if hasattr(said, "close"):
            said.close()
    status, headers = begun
    return Step(title, _text(f"{endpoint.method} {path} HTTP/1.1", lines, body), _text(_line(status), headers, answer))


def _line(status: str) -> str:
    code = int(status[:3])
    return f"HTTP/1.1 {code} {HTTPStatus(code).phrase}"


def _text(first: str, lines: Iterable[tuple[str, str]], body: bytes) -> str:
    shown = [f"{name.title()}: {text}" for name, text in lines]
    return "\n".join([first, *shown, "", body.decode("utf-8", "replace")]).rstrip()
