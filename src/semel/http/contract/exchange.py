"""One HTTP request and its possible answers, for ASGI and WSGI.

``Exchange`` reads the key, computes the fingerprint while the body arrives, and builds the answers: replays, refusals,
and the header lines of first answers. It makes no claim and knows neither sockets nor event loops.
"""

from __future__ import annotations

import json
import logging
import re
import zlib
from collections.abc import Iterable
from functools import lru_cache
from hashlib import blake2b
from operator import itemgetter
from typing import Any, Final
from urllib.parse import quote

from semel.core.call import Call
from semel.core.encoding.canonical import canonical_json, parse_json, select_fields
from semel.core.encoding.fingerprint import DIGEST_SIZE, hash_key
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
from semel.http.contract.rules import Conditional, Idempotent

__all__ = ["CLAIMED", "FAILED", "KEY", "RESPONSES", "SETTLED", "UNSTORED", "Exchange", "ResponseSerializer"]

KEY: Final = b"idempotency-key"
UNSTORED: Final = (b"idempotent-stored", b"false")
"""Marks an answer that could not be stored before it was sent. A client that has it must not retry."""
CLAIMED: Final = "semel.claimed"
"""Set in the scope or environ while an attempt runs: a second middleware of Semel must not claim the request."""
SETTLED: Final = StoredResponse(204, [], b"")
"""The answer to a DELETE of a resource that does not exist."""
FAILED: Final = StoredResponse(500, [(b"content-type", b"text/plain; charset=utf-8")], b"Internal Server Error")
"""The stored answer of a handler that raised, if the rule stores such errors."""
DOCUMENT_LIMIT: Final = 8 * 1024 * 1024
"""The largest body in bytes that is parsed as JSON or decompressed; a larger one is compared byte by byte."""
MOST_PARTS: Final = 10_000
"""How many parts of a multipart body are told apart. Behind them the boundary counts: a hostile body must be cheap."""
_MOST_MEMBERS: Final = 32
"""How many members a gzip body may have."""
_BOUNDARY: Final = re.compile(rb';[ \t]*boundary=(?:"([^"]{1,200})"|([^\s;"]{1,200}))', re.IGNORECASE)
DECOMPRESSED_LIMIT: Final = 64 * 1024 * 1024
"""The largest answer in bytes that is decompressed for a client; a larger one is sent as it is stored."""
_DECOMPRESSED: Final = frozenset({b"gzip", b"x-gzip", b"deflate"})
_PRECONDITIONS: Final = frozenset({b"content-type", b"if-match", b"if-none-match"})
_READ: Final = _PRECONDITIONS | {KEY, b"content-length", b"origin"}
"""Header lines of a request that are read for every rule."""
_EXPOSED: Final = ("Idempotency-Key", "Retry-After", "Link")
_FRAMING: Final = frozenset({b"content-length", b"transfer-encoding", b"content-type", b"trailer", KEY})
"""Header lines that describe one body. They are dropped from an answer that is replaced by another."""
_LONGEST_PATH: Final = 200
_log = logging.getLogger("semel.http")
_name = itemgetter(0)


def as_response(value: Any) -> StoredResponse:
    """Convert a result of ``resolve`` or of a recover hook: a StoredResponse stays as it is, data becomes JSON."""
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
    """A request, and the answers to it."""

    __slots__ = (
        "_body_size", "_counted", "_echoed", "_hash", "_keys", "_lines", "_query", "_scripted", "_verbatim",
        "announced_length", "body", "docs", "host", "key", "method", "path",
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
        self.host = ""
        """The host of the request, if its route is bound to hosts; it is a part of the operation then."""
        self.body: list[bytes] | None = []
        """Chunks of the body, for rules that read all of it; None if no rule does, or if it is too large for that."""
        self._body_size = 0
        self.key: str | None = None
        self._verbatim = False
        """Whether the key is echoed without adding quotes."""
        self._echoed: list[tuple[bytes, bytes]] | None = None
        self._query = query
        self._lines = headers
        self._hash = RequestHash(secret)
        self.announced_length = 0
        """The Content-Length, or 0 if there is none."""
        self._scripted = False
        """Whether a script in a browser sent the request."""
        self._keys: list[bytes] = []
        self._counted: list[tuple[bytes, bytes]] = []
        """Header lines that are part of every fingerprint."""
        for line, value in headers:
            name = line.lower()
            if name not in _READ:
                continue
            if name == KEY:
                self._keys.append(value)
            elif name == b"content-length":
                self.announced_length = self.announced_length or (int(value) if value.isdigit() else 0)
            elif name == b"origin":
                self._scripted = True
            else:
                self._counted.append((name, value))
                if value[:10].lower() == b"multipart/" and name == b"content-type":
                    self._hash.split_at(value)

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """All header lines of the request, with lower-case names."""
        return [(name.lower(), value) for name, value in self._lines]

    def feed(self, chunk: bytes) -> None:
        """Take the next chunk of the request's body."""
        self._hash.feed(chunk)
        if self.body is not None:
            self.body.append(chunk)
            self._body_size += len(chunk)
            if self._body_size > DOCUMENT_LIMIT:
                self.body = None

    def read_key(self, rule: Idempotent) -> str | None:
        """Return the key, or None if it is missing and optional. Raises KeyMissing or KeyInvalid."""
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
        self._echoed = [(KEY, lines[0])] if key == text else None  # a bare key is echoed as it was sent
        return key

    def operation(self, rule: Idempotent) -> str:
        """Return the operation, which scopes the key together with the tenant."""
        if rule.scope == "tenant":
            return "*"
        path = self.host + self.path
        if len(path) > _LONGEST_PATH or not path.isprintable():  # a store takes short text without control characters
            digest = blake2b(path.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
            path = f"{quote(path, errors='replace')[:_LONGEST_PATH]}#{digest}"
        return f"{self.method} {path}"

    def fingerprint(self, rule: Idempotent) -> bytes:
        """Return the hash that distinguishes a retry from another request. Call it once the body has arrived."""
        lines = self._counted
        if rule.fingerprint_headers:
            wanted = _PRECONDITIONS.union(name.lower().encode() for name in rule.fingerprint_headers)
            lines = [line for line in self.headers if line[0] in wanted]
        if len(lines) > 1:
            lines = sorted(lines, key=_name)  # lines of the same name keep their order
        if rule.compare_parts:  # a retry has another boundary
            lines = [
                (name, _BOUNDARY.sub(b"", value)) if name == b"content-type" else (name, value) for name, value in lines
            ]
        hash, document = self._hash, None
        if rule.reads_body and self.body is not None:
            body = b"".join(self.body)
            if rule.compare_decompressed and (plain := self._decompressed(body)) is not None:
                hash, body = hash.of(plain), plain
            document = self._document(rule, body) if rule.reads_json else None
        return hash.digest(self.method, self.host + self.path, self._query, lines, document)

    def _decompressed(self, body: bytes) -> bytes | None:
        """Return what a compressed body decompresses to; None if it is not compressed, or not in a way we read."""
        codings = [value.strip().lower() for name, value in self.headers if name == b"content-encoding"]
        return decompress(body, DOCUMENT_LIMIT) if codings in ([b"gzip"], [b"x-gzip"], [b"deflate"]) else None

    def call(self, guard: Guard, rule: Idempotent, key: str, tenant: str | None) -> Call:
        """Return the call to claim. Call it once the body has arrived."""
        try:
            owner = guard.tenant if tenant is None else checked_tenant(tenant)
        except RequestError as error:  # not the client's mistake
            raise ConfigurationError(f"tenant= gave no text of 1 to 255 characters: {error}") from error
        return guard.make_call(
            self.operation(rule),
            key,
            owner,
            self.fingerprint(rule),
            rule.policy,
            RESPONSES,
        )

    def preconditions(self, rule: Conditional) -> Preconditions:
        """Return the request's preconditions. Raises PreconditionError if they are malformed or missing."""
        return preconditions(self.headers, required=rule.precondition_required)

    @staticmethod
    def _document(rule: Idempotent, body: bytes) -> bytes | None:
        """Return the body as canonical JSON; None if it is not JSON, so that its bytes are compared."""
        try:
            document = parse_json(body)
            if rule.include or rule.exclude:
                document = select_fields(document, include=rule.include or None, exclude=rule.exclude or None)
            return canonical_json(document)
        except DocumentError:
            return None

    # -- answers

    def refusal(self, error: SemelError, rule: Idempotent | None) -> StoredResponse:
        """Return the answer to a request that is not run, or whose outcome is not known."""
        if isinstance(error, LeaseLost):  # all that a client needs to know: another attempt is running
            error = InProgress(str(error), retry_after=error.retry_after)
        # The guard has logged these already, once per cause.
        reported = (isinstance(error, StoreError) and error.retryable) or isinstance(error.__cause__, StoreError)
        if error.status >= 500 and not reported:
            text = str(error).replace(f"[{self.key}]", "[…]")  # keys may be secrets
            _log.error("%s %a: %s", self.method, self.path, text)
        status: int | None = None
        if rule is not None and isinstance(error, (KeyReused, InProgress)):
            status = rule.reused_status if isinstance(error, KeyReused) else rule.in_use_status
        answer = problem(error, instance=self.path, status=status, docs=self.docs)
        length = (b"content-length", str(len(answer.body)).encode())
        return answer._replace(headers=[*answer.headers, length, *self._echo()])

    def replay(self, stored: StoredResponse, rule: Idempotent) -> StoredResponse:
        """Return the first answer, marked as a replay."""
        status, lines, body, omitted = as_response(stored)
        for line in lines:
            if line[0] == b"content-encoding":
                lines, body = self._acceptable(lines, body, omitted)
                break
        headers = [
            *lines,
            (rule.replay_marker_name, b"omitted" if omitted else b"true"),
            *(self._echoed or self._echo()),
        ]
        if status not in (204, 304):
            headers.append((b"content-length", b"%d" % len(body)))
        return StoredResponse(status, headers, body, omitted)

    def _acceptable(
        self, lines: list[tuple[bytes, bytes]], body: bytes, omitted: bool
    ) -> tuple[list[tuple[bytes, bytes]], bytes]:
        """Return a compressed answer as it is stored, or decompressed for a client that does not accept its coding.

        It is decompressed only if the application chose the coding for its client, which ``Vary`` says. So a client
        that accepts the same codings as the first one gets the same bytes.
        """
        plain = [line for line in lines if line[0] != b"content-encoding"]
        if omitted:  # there is nothing to decode
            return plain, body
        codings, varies = _words(lines, b"content-encoding"), _words(lines, b"vary")
        accepted = _words(self.headers, b"accept-encoding")
        if b"accept-encoding" not in varies or all(coding in accepted or b"*" in accepted for coding in codings):
            return lines, body
        for coding in reversed(codings):
            decoded = decompress(body, DECOMPRESSED_LIMIT) if coding in _DECOMPRESSED else None
            if decoded is None:  # brotli and others, which the standard library cannot read
                return lines, body
            body = decoded
        return plain, body

    def with_key(self, headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        """Return the captured header lines of a first answer, with the key added."""
        return headers + (self._echoed or self._echo())

    def failure(self, stored: bool) -> StoredResponse:
        """Return the first answer of a handler that raised, if the rule stores such errors."""
        length = (b"content-length", str(len(FAILED.body)).encode())
        return FAILED._replace(headers=self.with_key([*FAILED.headers, length, *([] if stored else [UNSTORED])]))

    def with_carrier(
        self, answer: list[tuple[bytes, bytes]], carrier: Iterable[tuple[bytes, bytes]], rule: Idempotent | None = None
    ) -> list[tuple[bytes, bytes]]:
        """Return the header lines of an answer, plus those of the answer that it replaces, such as CORS headers.

        Lines that describe the other answer's body are left out.
        """
        if not carrier:
            return answer
        left_out = _FRAMING if rule is None else _FRAMING | rule.replay_header_names
        present = {name for name, _ in answer}
        lines = [(bytes(name).lower(), bytes(value)) for name, value in carrier]
        return answer + [
            line
            for line in lines
            # Both answers may have reasons to vary: CORS may be answered for this request, and not for the first.
            if (line[0] not in left_out and line[0] not in present) or (line[0] == b"vary" and line not in answer)
        ]

    def expose(self, headers: list[tuple[bytes, bytes]], rule: Idempotent | None = None) -> list[tuple[bytes, bytes]]:
        """Return the header lines. If a script in a browser may read the answer (CORS), let it read our headers too.

        The CORS header is often added later, by an outer middleware, so an Origin in the request is enough.
        """
        if not self._scripted:
            for line in headers:
                if line[0] == b"access-control-allow-origin":
                    break
            else:
                return headers
        name = b"access-control-expose-headers"
        named = [
            v.strip() for n, value in headers if n == name for v in value.decode("latin-1").split(",") if v.strip()
        ]
        mark = (rule.replay_marker if rule is not None else "idempotent-replayed").title()
        known = {word.lower() for word in named}
        ours = (*_EXPOSED, mark, "Idempotent-Stored") if UNSTORED in headers else (*_EXPOSED, mark)
        missing = [word for word in ours if word.lower() not in known]
        if not missing:
            return headers
        rest = [line for line in headers if line[0] != name]
        return [*rest, (name, ", ".join([*named, *missing]).encode("latin-1"))]

    def _echo(self) -> list[tuple[bytes, bytes]]:
        """Return the header line that repeats the key, or nothing without a key."""
        if self._echoed is None:
            self._echoed = [] if self.key is None else [(KEY, self._quoted(self.key).encode())]
        return self._echoed

    def _quoted(self, key: str) -> str:
        if self._verbatim:
            return key
        try:
            return header_value(key)
        except KeyInvalid:
            return header_value(key, quote=True)


def _words(lines: Iterable[tuple[bytes, bytes]], name: bytes) -> list[bytes]:
    """Return the words of a header that lists some, in lower case, without those of quality 0."""
    words = []
    for line, value in lines:
        for part in value.lower().split(b",") if line == name else ():
            word, _, quality = part.replace(b" ", b"").replace(b"\t", b"").partition(b";q=")
            if word and not (quality and quality.strip(b"0.") == b""):
                words.append(word)
    return words


class RequestHash:
    """The fingerprint of a request, computed while its body arrives.

    Each part is preceded by its length, so that no two requests give the same bytes. With a secret it is a MAC: see
    ``semel.core.encoding.fingerprint``.
    """

    __slots__ = ("_body", "_content_type", "_request", "_secret", "_size")

    def __init__(self, secret: bytes | None) -> None:
        self._secret = secret
        self._body: blake2b | PartsHash
        self._request, self._body = _new_hashes(secret)
        self._size = 0
        self._content_type = b""
        """That of a multipart body."""

    def split_at(self, content_type: bytes) -> None:
        """Leave the boundary of a multipart body out of the body's hash. It counts as a part of the Content-Type."""
        found = _BOUNDARY.search(content_type)
        if found is not None and not self._content_type:
            self._content_type = content_type
            self._body = PartsHash(_new_hashes(self._secret)[1], found[1] or found[2])

    def of(self, body: bytes) -> RequestHash:
        """Return the hash of the same request with another body."""
        other = RequestHash(self._secret)
        if self._content_type:
            other.split_at(self._content_type)
        other.feed(body)
        return other

    def feed(self, chunk: bytes) -> None:
        """Take the next chunk of the body. How the body is cut into chunks does not matter."""
        if self._size == 0:
            self._body = self._body.copy()
        self._body.update(chunk)
        self._size += len(chunk)

    def digest(
        self, method: str, path: str, query: bytes, lines: Iterable[tuple[bytes, bytes]], document: bytes | None
    ) -> bytes:
        """Return the hash of the whole request; a ``document`` takes the place of the body's bytes."""
        word, target = method.encode(), path.encode("utf-8", "surrogatepass")
        parts = b"%d:%b%d:%b%d:%b" % (len(word), word, len(target), target, len(query), query)
        for name, value in lines:
            parts += b"h%d:%b%d:%b" % (len(name), name, len(value), value)
        if document is None:
            parts += b"b%d:%b" % (0 if self._content_type else self._size, self._body.digest())
        else:
            parts += b"d%d:%b" % (len(document), document)
        whole = self._request.copy()
        whole.update(parts)
        return whole.digest()


class PartsHash:
    """The hash of a multipart body without its boundary, which each try makes anew.

    It is a hash of the hashes of what stands between the boundaries, so that two bodies have the same one only if they
    differ in nothing but the boundary.
    """

    __slots__ = ("_delimiter", "_empty", "_left", "_part", "_tail", "_whole")

    def __init__(self, empty: blake2b, boundary: bytes) -> None:
        self._empty = empty
        self._whole = empty.copy()
        self._part = empty.copy()
        self._delimiter = b"\r\n--" + boundary
        self._tail = b"\r\n"  # the first boundary has no line before it
        self._left = MOST_PARTS

    def copy(self) -> PartsHash:
        return self  # no two requests share it

    def update(self, chunk: bytes) -> None:
        *ended, rest = (self._tail + chunk).split(self._delimiter, self._left)
        for piece in ended:
            self._part.update(piece)
            self._whole.update(self._part.digest())
            self._part = self._empty.copy()
        self._left -= len(ended)
        kept = max(0, len(rest) - len(self._delimiter) + 1) if self._left else len(rest)
        self._part.update(rest[:kept])
        self._tail = rest[kept:]  # which may be the beginning of a boundary

    def digest(self) -> bytes:
        part, whole = self._part.copy(), self._whole.copy()
        part.update(self._tail)
        whole.update(part.digest())
        return whole.digest()


def decompress(body: bytes, limit: int) -> bytes | None:
    """Return what a gzip or zlib body decompresses to; None if it is neither, is cut, or expands beyond the limit."""
    plain = b""
    for _ in range(_MOST_MEMBERS):
        stream = zlib.decompressobj(zlib.MAX_WBITS | 32)  # gzip or zlib, as its first bytes say
        try:
            plain += stream.decompress(body, limit - len(plain) + 1)
        except zlib.error:
            return None
        if len(plain) > limit or not stream.eof:
            return None
        body = stream.unused_data
        if not body:
            return plain
    return None


@lru_cache(maxsize=16)
def _new_hashes(secret: bytes | None) -> tuple[blake2b, blake2b]:
    """Return empty hashes for a request and its body. They are copied, which is cheaper than creating new ones."""
    key = hash_key(secret)
    return (
        blake2b(digest_size=DIGEST_SIZE, key=key, person=b"semel.request.2"),
        blake2b(digest_size=32, key=key, person=b"semel.body.2"),
    )
