"""One request under the contract, as pure code: headers in, decisions and answers out. ASGI and WSGI use it alike.

It reads the key, builds the fingerprint while the body streams by, captures the answer, and says what is sent. It makes
no claim itself and knows neither sockets nor event loops.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from functools import lru_cache
from hashlib import blake2b
from operator import itemgetter
from typing import Any, Final
from urllib.parse import quote

from semel.core.call import Call
from semel.core.encoding.canonical import canonical_json, parse_json, select_fields
from semel.core.encoding.serializers import NotSerializable
from semel.core.encoding.snapshot import Kind, StoredResponse, decode_response, encode_response
from semel.core.keys import header_value, parse_header
from semel.engine.guard import Guard, checked_tenant
from semel.errors import (
    ConfigurationError,
    DocumentError,
    InProgress,
    KeyInvalid,
    KeyMissing,
    KeyReused,
    LeaseLost,
    RequestError,
    SemelError,
    StoreError,
)
from semel.http.contract.conditional import Preconditions, preconditions
from semel.http.contract.problems import problem
from semel.http.contract.request_hash import RequestHash
from semel.http.contract.rules import Conditional, Idempotent
from semel.observe import events

__all__ = ["CLAIMED", "FAILED", "KEY", "RESPONSES", "SETTLED", "Exchange", "ResponseSerializer"]

KEY: Final = b"idempotency-key"
CLAIMED: Final = "semel.claimed"
"""Stands in the scope or environ of a request while its attempt runs: another middleware of ours must not claim it."""
SETTLED: Final = StoredResponse(204, [], b"")
"""The answer to a deletion of what is not there."""
FAILED: Final = StoredResponse(500, [(b"content-type", b"text/plain; charset=utf-8")], b"Internal Server Error")
"""What is remembered of a handler that raised, where that is an answer."""
DOCUMENT_LIMIT: Final = 8 * 1024 * 1024
"""Bytes of a request's body that are read as JSON; a larger one is compared byte by byte."""
_PRECONDITIONS: Final = frozenset({b"content-type", b"if-match", b"if-none-match"})
_READ: Final = _PRECONDITIONS | {KEY, b"content-length", b"origin"}
"""Lines of a request that are read for every rule; they are picked out in one look."""
_EXPOSED: Final = ("Idempotency-Key", "Retry-After", "Link")
_FRAMING: Final = frozenset({b"content-length", b"transfer-encoding", b"content-type", b"trailer", KEY})
"""Lines that belong to one body; those of an answer that only stands for another are left out."""
_LONGEST_PATH: Final = 200
_log = logging.getLogger("semel.http")
_name = itemgetter(0)


def as_response(value: Any) -> StoredResponse:
    """An answer from what ``resolve`` or a recover hook says: a StoredResponse as it is, plain data as JSON."""
    if isinstance(value, StoredResponse):
        return value
    if value is None:
        return StoredResponse(204, [], b"")
    try:
        body = json.dumps(value).encode()
    except (TypeError, ValueError) as error:
        raise NotSerializable(
            f"an HTTP answer is a StoredResponse or plain data, not {type(value).__name__}"
        ) from error
    return StoredResponse(200, [(b"content-type", b"application/json")], body)


class ResponseSerializer:
    """Stores results that are HTTP responses. See ``semel.core.encoding.serializers.ResultSerializer``."""

    name: Final = ""
    kind: Final = Kind.RESPONSE

    def encode(self, value: Any) -> bytes:
        status, headers, body, omitted = as_response(value)
        try:
            return encode_response(status, headers, body, body_omitted=omitted)
        except ValueError as error:
            raise NotSerializable(str(error)) from error

    def shorten(self, value: Any) -> StoredResponse | None:
        """Return the response without its body. The client gets all of it; a replay says that the body is missing."""
        try:
            response = as_response(value)
        except NotSerializable:  # an exception that is remembered
            return None
        return response._replace(body=b"", body_omitted=True) if response.body else None

    def has_effect(self, value: Any) -> bool:
        """An error response is stored without the handler's writes, as it is without its rows in a transaction."""
        return as_response(value).status < 400

    decode = staticmethod(decode_response)
    convert = staticmethod(as_response)


RESPONSES: Final = ResponseSerializer()


class Exchange:
    """What is known of a request, and what will be said."""

    __slots__ = (
        "_body_size", "_counted", "_echoed", "_hash", "_keys", "_length", "_lines", "_query", "_scripted", "_verbatim",
        "body", "docs", "key", "method", "path",
    )  # fmt: skip

    def __init__(
        self,
        method: str,
        path: str,
        query: bytes,
        headers: Iterable[tuple[bytes, bytes]],
        *,
        secret: bytes | None = None,
        docs: str | None = None,
    ) -> None:
        self.method = method
        self.path = path
        self.docs = docs
        self.body: list[bytes] | None = []
        """Chunks of the body, for rules that read it as a whole; None once it is larger than such rules read."""
        self._body_size = 0
        self.key: str | None = None
        self._verbatim = False
        """Whether quotes belong to the key, and so are not ours to add."""
        self._echoed: list[tuple[bytes, bytes]] | None = None
        self._query = query
        self._lines = headers
        self._hash = RequestHash(secret)
        self._length = b""
        self._scripted = False
        """Whether a script of some origin asks."""
        self._keys: list[bytes] = []
        self._counted: list[tuple[bytes, bytes]] = []
        """Lines that are part of every fingerprint."""
        for line, value in headers:
            name = line.lower()
            if name not in _READ:
                continue
            if name == KEY:
                self._keys.append(value)
            elif name == b"content-length":
                self._length = self._length or value
            elif name == b"origin":
                self._scripted = True
            else:
                self._counted.append((name, value))

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """All lines of the request, by lower-case names."""
        return [(name.lower(), value) for name, value in self._lines]

    def announced(self) -> int:
        """The length that the client says its body has; 0 where it does not say."""
        return int(self._length) if self._length.isdigit() else 0

    def fed(self, chunk: bytes) -> None:
        """A chunk of the request's body came by."""
        self._hash.fed(chunk)
        if self.body is not None:
            self.body.append(chunk)
            self._body_size += len(chunk)
            if self._body_size > DOCUMENT_LIMIT:
                self.body = None

    def read_key(self, rule: Idempotent) -> str | None:
        """The key, or None where the route may go without. Raises KeyMissing or KeyInvalid."""
        lines = self._keys
        if not lines:
            if rule.required:
                raise KeyMissing("This request needs an Idempotency-Key header: a new key for each new request.")
            return None
        if len(lines) > 1:
            raise KeyInvalid("Send one Idempotency-Key header line, not several.")
        try:
            text = lines[0].decode("ascii")
        except UnicodeDecodeError as error:
            raise KeyInvalid("The Idempotency-Key holds characters other than printable ASCII.") from error
        key = self.key = parse_header(text, rule.key_mode, rule.key_format)
        self._verbatim = rule.key_mode == "raw"
        self._echoed = [(KEY, lines[0])] if key == text else None  # a bare key is said as it was sent
        return key

    def operation(self, rule: Idempotent) -> str:
        """What scopes the key, beside the tenant."""
        if rule.scope == "tenant":
            return "*"
        path = self.path
        if len(path) > _LONGEST_PATH or not path.isprintable():  # a store takes short text without control characters
            digest = blake2b(path.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
            path = f"{quote(path, errors='replace')[:_LONGEST_PATH]}#{digest}"
        return f"{self.method} {path}"

    def fingerprint(self, rule: Idempotent) -> bytes:
        """Of all that makes this request this request; asked once the body is through."""
        lines = self._counted
        if rule.fingerprint_headers:
            wanted = _PRECONDITIONS.union(name.lower().encode() for name in rule.fingerprint_headers)
            lines = [line for line in self.headers if line[0] in wanted]
        if len(lines) > 1:
            lines = sorted(lines, key=_name)  # lines of one name keep their order, names have none
        document = self._document(rule) if rule.reads_json else None
        return self._hash.digest(self.method, self.path, self._query, lines, document)

    def call(self, guard: Guard, rule: Idempotent, key: str, tenant: str | None) -> Call:
        """The call to claim, once the body is through."""
        try:
            whose = guard.tenant if tenant is None else checked_tenant(tenant)
        except RequestError as error:  # not the client's mistake
            raise ConfigurationError(f"tenant= gave no text of 1 to 255 characters: {error}") from error
        return guard.make_call(
            self.operation(rule),
            key,
            whose,
            self.fingerprint(rule),
            rule.policy,
            RESPONSES,
        )

    def preconditions(self, rule: Idempotent) -> Preconditions | None:
        """What the request asks of the resource, where the route is conditional. Raises PreconditionError."""
        if not isinstance(rule, Conditional):
            return None
        return preconditions(self.headers, required=rule.precondition_required)

    def tell_unprotected(self, guard: Guard, rule: Idempotent) -> None:
        """A route whose key is optional runs without one. A conditional one is protected by its precondition."""
        if isinstance(rule, Conditional):
            return
        guard.make_call(self.operation(rule), "", guard.tenant, b"", rule.policy).tell(events.Unkeyed)

    def _document(self, rule: Idempotent) -> bytes | None:
        """The body as canonical JSON, where the rule asks for that; None where it is no JSON: then its bytes count."""
        if self.body is None:
            return None
        try:
            document = parse_json(b"".join(self.body))
            if rule.include or rule.exclude:
                document = select_fields(document, include=rule.include or None, exclude=rule.exclude or None)
            return canonical_json(document)
        except DocumentError:
            return None

    # -- answers

    def refusal(self, error: SemelError, rule: Idempotent | None) -> StoredResponse:
        """The answer to a request that is not run, or whose outcome is not known."""
        if isinstance(error, LeaseLost):  # for a client there is one thing to know: another attempt is on its way
            error = InProgress(str(error), retry_after=error.retry_after)
        passing = isinstance(error, StoreError) and error.retryable  # the store's failures are events
        if error.status >= 500 and not passing:
            _log.error("%s %a: %s", self.method, self.path, error)
        status = rule.reused_status if rule is not None and isinstance(error, KeyReused) else None
        answer = problem(error, instance=self.path, status=status, docs=self.docs)
        length = (b"content-length", str(len(answer.body)).encode())
        return answer._replace(headers=[*answer.headers, length, *self._echo()])

    def replay(self, stored: StoredResponse, rule: Idempotent) -> StoredResponse:
        """The first answer again, marked as such."""
        status, lines, body, omitted = as_response(stored)
        if omitted:  # nothing is left to be decoded
            lines = [line for line in lines if line[0] != b"content-encoding"]
        headers = [*lines, (rule.replay_marker_name, b"omitted" if omitted else b"true"), *self._echo()]
        if status not in (204, 304):
            headers.append((b"content-length", b"%d" % len(body)))
        return StoredResponse(status, headers, body, omitted)

    def first(self, headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        """The header lines of a first answer: its own, as they were captured, and the key as an echo."""
        return headers + self._echo()

    def failed(self) -> StoredResponse:
        """What a client is told of a handler that raised, where that is an answer."""
        length = (b"content-length", str(len(FAILED.body)).encode())
        return FAILED._replace(headers=self.first([*FAILED.headers, length]))

    def carried(
        self, answer: list[tuple[bytes, bytes]], carrier: Iterable[tuple[bytes, bytes]], rule: Idempotent | None = None
    ) -> list[tuple[bytes, bytes]]:
        """The lines of an answer, with those that belong to the exchange that carries it, such as CORS's."""
        if not carrier:
            return answer
        left_out = _FRAMING if rule is None else _not_carried(rule.replay_header_names)
        has = {name for name, _ in answer}
        lines = [(bytes(name).lower(), bytes(value)) for name, value in carrier]
        return answer + [line for line in lines if line[0] not in left_out and line[0] not in has]

    def exposed(self, headers: list[tuple[bytes, bytes]], rule: Idempotent | None = None) -> list[tuple[bytes, bytes]]:
        """The same lines; where a script may be given the answer (CORS), it may read ours as well.

        What allows it is often added outside of us, so it is enough that a script of some origin asks.
        """
        if not (self._scripted or _speaks(headers, b"access-control-allow-origin")):
            return headers
        name = b"access-control-expose-headers"
        said = [v.strip() for n, value in headers if n == name for v in value.decode("latin-1").split(",") if v.strip()]
        mark = (rule.replay_marker if rule is not None else "idempotent-replayed").title()
        known = {word.lower() for word in said}
        missing = [word for word in (*_EXPOSED, mark) if word.lower() not in known]
        if not missing:
            return headers
        rest = [line for line in headers if line[0] != name]
        return [*rest, (name, ", ".join([*said, *missing]).encode("latin-1"))]

    def _echo(self) -> list[tuple[bytes, bytes]]:
        if self._echoed is None:
            self._echoed = self._made_echo()
        return self._echoed

    def _made_echo(self) -> list[tuple[bytes, bytes]]:
        if self.key is None:
            return []
        if self._verbatim:
            return [(KEY, self.key.encode())]
        try:
            return [(KEY, header_value(self.key).encode())]
        except KeyInvalid:
            return [(KEY, header_value(self.key, quote=True).encode())]


def _speaks(headers: list[tuple[bytes, bytes]], wanted: bytes) -> bool:
    for line in headers:  # noqa: SIM110 (a generator costs more than the lines)
        if line[0] == wanted:
            return True
    return False


@lru_cache(maxsize=64)
def _not_carried(replayed: frozenset[bytes]) -> frozenset[bytes]:
    return _FRAMING | replayed
