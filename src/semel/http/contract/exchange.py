"""One HTTP request and its possible answers, for ASGI and WSGI.

``Exchange`` reads the key, computes the fingerprint while the body arrives, and builds the answers: replays, refusals,
and the header lines of first answers. It makes no claim and knows neither sockets nor event loops. What an answer is
made of, whatever the request, is in ``responses.py``.
"""

from __future__ import annotations

import logging
import re
import zlib
from collections.abc import Iterable
from functools import lru_cache
from hashlib import blake2b
from operator import itemgetter
from typing import Final
from urllib.parse import quote

from semel.core.call import Call
from semel.core.encoding.canonical import canonical_json, parse_json, select_fields
from semel.core.encoding.fingerprint import DIGEST_SIZE, hash_key
from semel.core.encoding.snapshot import StoredResponse, make_response
from semel.core.keys import BARE_KEY, header_value, parse_header
from semel.core.lineage import LINEAGE_HEADERS, label
from semel.engine.guard import Guard
from semel.errors import (
    ConfigurationError,
    DocumentError,
    InProgress,
    KeyInvalid,
    KeyMissing,
    KeyReused,
    LeaseLost,
    PolicyError,
    RequestError,
    SemelError,
    StoreError,
)
from semel.http.contract.responses import FAILED, RESPONSES, UNSTORED, as_response, problem
from semel.http.contract.rules import Idempotent, is_header_name

CLAIMED: Final = "semel.claimed"
"""Set in the scope or environ while an attempt runs: a second middleware of Semel must not claim the request."""
DOCUMENT_LIMIT: Final = 8 * 1024 * 1024
"""The largest body in bytes that is parsed as JSON or decompressed; a larger one is compared byte by byte."""
MOST_PARTS: Final = 10_000
"""How many parts of a multipart body are hashed one by one. From there on the boundary is hashed too: a hostile body
must be cheap."""
_MOST_MEMBERS: Final = 32
"""How many members a gzip body may have."""
_BOUNDARY: Final = re.compile(rb';[ \t]*boundary=(?:"([^"]{1,200})"|([^\s;"]{1,200}))', re.IGNORECASE)
DECOMPRESSED_LIMIT: Final = 64 * 1024 * 1024
"""The largest answer in bytes that is decompressed for a client; a larger one is sent as it is stored."""
_DECOMPRESSED: Final = frozenset({b"gzip", b"x-gzip", b"deflate"})
_PRECONDITIONS: Final = frozenset({b"content-type", b"if-match", b"if-none-match"})
_READ: Final = _PRECONDITIONS | LINEAGE_HEADERS | {b"content-length", b"origin"}
"""Header lines of a request that are read for every rule, besides the key."""
_FRAMING: Final = frozenset({b"content-length", b"transfer-encoding", b"content-type", b"trailer"})
"""Header lines that describe one body. They are dropped from an answer that is replaced by another."""
_TAKEN: Final = _READ | _FRAMING | {b"authorization", b"cookie", b"host", b"retry-after", b"link"}
"""Names of headers that mean something else."""
_LONGEST_PATH: Final = 200
_LONGEST_LINE: Final = 100
ALLOW_ORIGIN: Final = b"access-control-allow-origin"
_log = logging.getLogger("semel.http")
name_of_line = itemgetter(0)


class KeyHeader:
    """The header that has the key, in each of the spellings that are compared."""

    __slots__ = ("framing", "name", "read", "title", "variable")

    def __init__(self, title: object) -> None:
        """Raises PolicyError if this cannot be the header of the key."""
        if not is_header_name(title) or title.lower().encode() in _TAKEN:
            raise PolicyError(f'header= is the name of the header that has the key, "X-Idempotency-Key", not {title!r}')
        self.title = title
        """As it is shown to people."""
        self.name = title.lower().encode()
        """In lower case, as in ASGI."""
        self.variable = "HTTP_" + title.upper().replace("-", "_")
        """In the environ of WSGI."""
        self.read = _READ | {self.name}
        self.framing = _FRAMING | {self.name}


KEY_HEADER: Final = KeyHeader("Idempotency-Key")


class Exchange:
    """A request, and the answers to it."""

    host = ""
    """The host of the request, if its route is bound to hosts; it is a part of the operation then."""
    size = 0
    """Bytes of the body that have arrived."""
    complete = False
    """Whether the application has read the body to its end before the claim."""
    key: str | None = None
    announced_length = 0
    """The Content-Length, or 0 if there is none."""
    _boundary = b""
    """The boundary of a multipart body."""
    scripted = False
    """Whether a script in a browser sent the request."""
    whole: bytes | None = None
    """The body, if it came at once and is not read for the comparison: it is hashed when the call is made."""
    lineage: dict[bytes, bytes] | None = None
    """Header lines that say where the request comes from, if there are any."""

    def __init__(
        self,
        method: str,
        path: str,
        query: bytes,
        headers: Iterable[tuple[bytes, bytes]],
        secret: bytes | None = None,
        docs: str | None = None,
        key_header: KeyHeader = KEY_HEADER,
    ) -> None:
        self.key_header = key_header
        self.method = method
        self.path = path
        self.docs = docs
        self.body: list[bytes] | None = []
        """Chunks of the body, for rules that read all of it; None if no rule does, or if it is too large for that."""
        self.echo: list[tuple[bytes, bytes]] = []
        """The header line that repeats the key in the answer; empty without a key."""
        self._query = query
        self._lines = headers
        self._body_hash: blake2b | PartsHash
        self._request_hash, self._empty_hash = _new_hashes(secret)
        self._body_hash = self._empty_hash
        self.keys: list[bytes] = []
        """The lines of the key, valid or not."""
        self._counted: list[tuple[bytes, bytes]] = []
        """Header lines that are part of every fingerprint."""
        read, key_name = key_header.read, key_header.name
        for line, value in headers:
            name = line.lower()
            if name not in read:
                continue
            if name == key_name:
                self.keys.append(value)
            elif name == b"content-length":
                self.announced_length = self.announced_length or (int(value) if value.isdigit() else 0)
            elif name == b"origin":
                self.scripted = True
            elif name in LINEAGE_HEADERS:
                self.lineage = {**(self.lineage or {}), name: value}
            else:
                self._counted.append((name, value))
                if name == b"content-type" and value[:10].lower() == b"multipart/" and not self._boundary:
                    found = _BOUNDARY.search(value)
                    if found is not None:
                        self._boundary = found[1] or found[2]
                        self._body_hash = self._new_body_hash()

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """All header lines of the request, with lower-case names."""
        return [(name.lower(), value) for name, value in self._lines]

    def feed(self, chunk: bytes, more: bool = True) -> None:
        """Take the next chunk of the request's body. How the body is cut into chunks does not matter.

        :param more: whether more chunks may follow.
        """
        self.complete = not more
        if not chunk:
            return
        if self.size == 0:
            self._body_hash = self._body_hash.copy()
        self._body_hash.update(chunk)
        self.size += len(chunk)
        if self.body is not None:
            self.body.append(chunk)
            if self.size > DOCUMENT_LIMIT:
                self.body = None

    def read_key(self, rule: Idempotent) -> str | None:
        """Return the key, or None if it is missing and optional. Raises KeyMissing or KeyInvalid."""
        lines = self.keys
        if not lines:
            if rule.required:
                raise KeyMissing(
                    f"This request needs the header {self.key_header.title}: a new key for each new request."
                )
            return None
        if len(lines) > 1:
            raise KeyInvalid(f"Send one {self.key_header.title} header line, not several.")
        # A short cut for ordinary bare keys. The code below gives the same answer for them.
        format, line = rule.key_format, lines[0]
        if rule.takes_bare_keys and len(line) <= format.max_length and BARE_KEY.fullmatch(line):
            self.echo = [(self.key_header.name, line)]
            self.key = key = line.decode()
            return key
        try:
            text = line.decode("ascii")
        except UnicodeDecodeError as error:
            raise KeyInvalid(f"The {self.key_header.title} holds characters other than printable ASCII.") from error
        key = self.key = parse_header(text, rule.key_mode, format, self.key_header.title)
        if key == text:
            self.echo = [(self.key_header.name, line)]  # a bare key is echoed as it was sent
        else:
            value = key if rule.key_mode == "raw" else _quoted(key)
            self.echo = [(self.key_header.name, value.encode())]
        return key

    def fingerprint(self, rule: Idempotent) -> bytes:
        """Return the hash that distinguishes a retry from another request. Call it once the body has arrived."""
        lines = self._counted
        if rule.fingerprint_headers:
            wanted = _PRECONDITIONS.union(name.lower().encode() for name in rule.fingerprint_headers)
            lines = [line for line in self.headers if line[0] in wanted]
        if len(lines) > 1:
            lines = sorted(lines, key=name_of_line)  # lines of the same name keep their order
        if rule.compare_parts:  # a retry has another boundary
            lines = [
                (name, _BOUNDARY.sub(b"", value)) if name == b"content-type" else (name, value) for name, value in lines
            ]
        document = other = None
        if rule.reads_body and self.body is not None:
            body = b"".join(self.body)
            if rule.compare_decompressed and (plain := self._decompressed(body)) is not None:
                other = body = plain
            document = self._document(rule, body) if rule.reads_json else None
        return self.digest(lines, document, self.whole if other is None else other)

    def digest(
        self, lines: Iterable[tuple[bytes, bytes]], document: bytes | None, other_body: bytes | None = None
    ) -> bytes:
        """Return the hash of the whole request. A ``document`` takes the place of the body's bytes.

        Each part is preceded by its length, so that no two requests give the same bytes. With a secret it is a MAC: see
        ``semel.core.encoding.fingerprint``.

        :param other_body: takes the place of the body that was sent.
        """
        path, query = self.host + self.path, self._query
        _, target = (_known_target if len(path) <= _LONGEST_PATH else _read_target)(self.method, path)
        parts = b"%b%d:%b" % (target, len(query), query) if query else target + b"0:"
        for line in lines:
            parts += _known_line(line) if len(line[1]) <= _LONGEST_LINE else _read_line(line)
        if document is None:
            body, size = self._body_hash, self.size
            if other_body is not None:
                body, size = self._new_body_hash() if self._boundary else self._empty_hash.copy(), len(other_body)
                body.update(other_body)
            parts += b"b%d:%b" % (0 if self._boundary else size, body.digest())
        else:
            parts += b"d%d:%b" % (len(document), document)
        whole = self._request_hash.copy()
        whole.update(parts)
        return whole.digest()

    def _new_body_hash(self) -> blake2b | PartsHash:
        """Return an empty hash for the body. For a multipart body it leaves out the boundary, which is hashed with the
        Content-Type.
        """
        return PartsHash(self._empty_hash, self._boundary) if self._boundary else self._empty_hash.copy()

    def _decompressed(self, body: bytes) -> bytes | None:
        """Return what a compressed body decompresses to; None if it is not compressed, or not in a way we read."""
        codings = [value.strip().lower() for name, value in self.headers if name == b"content-encoding"]
        return decompress(body, DOCUMENT_LIMIT) if codings in ([b"gzip"], [b"x-gzip"], [b"deflate"]) else None

    def call(self, guard: Guard, rule: Idempotent, key: str, tenant: str | None) -> Call:
        """Return the call to claim. Call it once the body has arrived."""
        try:
            known = guard.tenants.get(tenant) if type(tenant) is str else None
            owner = known or (guard.tenant if tenant is None else guard.check_tenant(tenant))
        except RequestError as error:  # not the client's mistake
            raise ConfigurationError(f"tenant= gave no text of 1 to 255 characters: {error}") from error
        path, operation = self.host + self.path, "*"
        if rule.scope != "tenant":  # a long path is not remembered
            operation, _ = (_known_target if len(path) <= _LONGEST_PATH else _read_target)(self.method, path)
        lines = self._counted
        plain = rule.compares_bytes and len(lines) < 2
        fingerprint = self.digest(lines, None, self.whole) if plain else self.fingerprint(rule)
        call = guard.make_call(operation, key, owner, fingerprint, rule.policy, RESPONSES)
        if self.lineage is not None:
            call.lineage = self.lineage
            if call.stored_key is not None and b"idempotency-root" in self.lineage:
                call.stored_key = label(key, self.lineage)
        return call

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
        return self._with_length(problem(error, instance=self.path, status=status, docs=self.docs))

    def replay(self, stored: StoredResponse, rule: Idempotent) -> StoredResponse:
        """Return the first answer, marked as a replay."""
        status, lines, body, omitted = stored if type(stored) is StoredResponse else as_response(stored)
        if b"content-encoding" in map(name_of_line, lines):
            lines, body = self._acceptable(lines, body, omitted)
        headers = [*lines, (rule.replay_marker_name, b"omitted" if omitted else b"true"), *self.echo]
        if status not in (204, 304):
            headers.append((b"content-length", b"%d" % len(body)))
        return make_response((status, headers, body, omitted))

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

    def failure(self, stored: bool) -> StoredResponse:
        """Return the first answer of a handler that raised, if the rule stores such errors."""
        return self._with_length(FAILED, *([] if stored else [UNSTORED]))

    def _with_length(self, answer: StoredResponse, *lines: tuple[bytes, bytes]) -> StoredResponse:
        length = (b"content-length", b"%d" % len(answer.body))
        return answer._replace(headers=[*answer.headers, length, *lines, *self.echo])

    def with_carrier(
        self, answer: list[tuple[bytes, bytes]], carrier: Iterable[tuple[bytes, bytes]], rule: Idempotent | None = None
    ) -> list[tuple[bytes, bytes]]:
        """Return the header lines of an answer, plus those of the answer that it replaces, such as CORS headers.

        Lines that describe the other answer's body are left out.
        """
        framing = self.key_header.framing
        left_out = framing if rule is None else framing | rule.replay_header_names
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
        if not self.scripted and ALLOW_ORIGIN not in map(name_of_line, headers):
            return headers
        name = b"access-control-expose-headers"
        lists = ",".join(text.decode("latin-1") for line, text in headers if line == name)
        named = [word.strip() for word in lists.split(",") if word.strip()]
        mark = (rule.replay_marker if rule is not None else "idempotent-replayed").title()
        known = {word.lower() for word in named}
        ours = [self.key_header.title, "Retry-After", "Link", mark]
        if UNSTORED in headers:
            ours.append("Idempotent-Stored")
        missing = [word for word in ours if word.lower() not in known]
        if not missing:
            return headers
        rest = [line for line in headers if line[0] != name]
        return [*rest, (name, ", ".join([*named, *missing]).encode("latin-1"))]


def _read_target(method: str, path: str) -> tuple[str, bytes]:
    """Return the operation, which scopes the key together with the tenant, and the beginning of the fingerprint."""
    word, target = method.encode(), path.encode("utf-8", "surrogatepass")
    beginning = b"%d:%b%d:%b" % (len(word), word, len(target), target)
    if len(path) > _LONGEST_PATH or not path.isprintable():  # a store takes short text without control characters
        digest = blake2b(target, digest_size=16).hexdigest()
        path = f"{quote(path, errors='replace')[:_LONGEST_PATH]}#{digest}"
    return f"{method} {path}", beginning


_known_target: Final = lru_cache(maxsize=1024)(_read_target)


def _read_line(line: tuple[bytes, bytes]) -> bytes:
    """Return a header line as a part of the fingerprint."""
    return b"h%d:%b%d:%b" % (len(line[0]), line[0], len(line[1]), line[1])


_known_line: Final = lru_cache(maxsize=256)(_read_line)


def _words(lines: Iterable[tuple[bytes, bytes]], name: bytes) -> list[bytes]:
    """Return the words of a header that lists some, in lower case, without those of quality 0."""
    words = []
    for line, value in lines:
        for part in value.lower().split(b",") if line == name else ():
            word, _, quality = part.replace(b" ", b"").replace(b"\t", b"").partition(b";q=")
            if word and not (quality and quality.strip(b"0.") == b""):
                words.append(word)
    return words


def _quoted(key: str) -> str:
    """Return the key as a field value, quoted if it needs quotes."""
    try:
        return header_value(key)
    except KeyInvalid:
        return header_value(key, quote=True)


class PartsHash:
    """The hash of a multipart body without its boundary, which each attempt makes anew.

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
        end = max(0, len(rest) - len(self._delimiter) + 1) if self._left else len(rest)
        self._part.update(rest[:end])
        self._tail = rest[end:]  # which may be the beginning of a boundary

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
