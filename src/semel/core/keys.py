"""Keys: checking them, reading and writing them in headers, and deriving identities and further keys from them.

A key names one intent of one client. This module checks keys, reads and writes the ``Idempotency-Key`` header field,
turns (tenant, operation, key) into the record's identity, and derives the keys that are sent on to the next hop.

A key is opaque text: it is compared as it was sent, neither case-folded nor Unicode-normalised, and it is never made
from a request's body. This module must not know requests, records, stores or the time. It does not generate keys: that
is the client's part, and needs randomness.
"""

from __future__ import annotations

import re
from binascii import a2b_hex
from dataclasses import dataclass
from hashlib import blake2b
from typing import ClassVar, Literal
from uuid import UUID

from semel.errors import KeyInvalid, KeyMissing, PolicyError, RequestError

MAX_KEY_LENGTH = 255
"""In characters. Stores size their columns by it; a format may allow less."""

HeaderMode = Literal["auto", "strict", "raw"]

_ABBREVIATED = 12
"""How many characters of a refused key an error shows: enough to find it in a log, too few to leak it."""

# NUL breaks databases, CR and LF break headers, and lone surrogates cannot be encoded as UTF-8.
_UNFIT = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
_HEX = "[0-9A-Fa-f]"
# The nil UUID means "no value" (RFC 9562, 5.9). Every client with an unset variable would send it.
_UUID = re.compile(f"(?![-0]+$){_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}")
_ULID = re.compile("[0-7][0-9A-HJKMNP-TV-Za-hjkmnp-tv-z]{25}")


@dataclass(frozen=True, slots=True)
class KeyFormat:
    """What an operation accepts as a key: a named format or a pattern, and a maximum length.

    ``uuid`` is any UUID of RFC 9562 except the nil one, as 8-4-4-4-12 hexadecimal digits; ``ulid`` is 26 digits of
    Crockford's base 32. Both are accepted in upper and lower case, and the case counts: ``ABC…`` and ``abc…`` are two
    keys. A retry sends the same bytes as the first try, so folding would gain nothing, and a gateway or consumer in
    another language that does not fold would disagree about which calls are the same.
    """

    name: str
    pattern: re.Pattern[str] | None = None
    expected: str = "any text"
    max_length: int = MAX_KEY_LENGTH

    NAMES: ClassVar[tuple[str, ...]] = ("any", "uuid", "ulid")

    def __post_init__(self) -> None:
        if type(self.max_length) is not int or not 1 <= self.max_length <= MAX_KEY_LENGTH:
            raise PolicyError(f"a key's maximum length must be from 1 to {MAX_KEY_LENGTH}, not {self.max_length!r}")

    @classmethod
    def named(cls, name: str, *, max_length: int = MAX_KEY_LENGTH) -> KeyFormat:
        """Return the format of that name: ``any``, ``uuid`` or ``ulid``. Raises PolicyError."""
        match name:
            case "any":
                return cls(name, max_length=max_length)
            case "uuid":
                return cls(name, _UUID, "a UUID that is not nil, like 0f8fad5b-d9cb-469f-a165-70867728950e", max_length)
            case "ulid":
                return cls(name, _ULID, "a ULID, like 01ARZ3NDEKTSV4RRFFQ69G5FAV", max_length)
        raise PolicyError(f"unknown key format {name!r}: choose one of {', '.join(cls.NAMES)}, or give a pattern")

    @classmethod
    def matching(cls, pattern: str, *, max_length: int = MAX_KEY_LENGTH) -> KeyFormat:
        """Return a format for keys that match a regular expression as a whole. Raises PolicyError.

        The length is checked first, so that a slow pattern never sees a long key.
        """
        try:
            compiled = re.compile(pattern)
        except (re.error, TypeError, OverflowError, RecursionError) as exc:
            raise PolicyError(f"the key pattern {pattern!r} is no regular expression: {exc}") from exc
        return cls("pattern", compiled, f"a key that matches {pattern}", max_length)

    def check(self, key: str) -> None:
        """Raise KeyInvalid unless the key is short enough, has this format and can be stored."""
        if not key:
            raise KeyInvalid(f"the key is empty: expected {self.expected}")
        if len(key) > self.max_length:
            raise KeyInvalid(
                f"the key {_abbreviate(key)} has {len(key)} characters: at most {self.max_length} are accepted"
            )
        if _UNFIT.search(key):
            raise KeyInvalid(f"the key {_abbreviate(key)} holds a control character or a lone surrogate")
        if key.isspace():
            raise KeyInvalid("the key consists of blanks")
        if self.pattern is not None and self.pattern.fullmatch(key) is None:
            raise KeyInvalid(f"the key {_abbreviate(key)} is not of the accepted format: expected {self.expected}")


ANY = KeyFormat.named("any")


def normalize_key(value: object, format: KeyFormat = ANY) -> str:
    """Return the key of a function call as text. Raises KeyMissing for None and ``""``, and KeyInvalid.

    A key is a text, a whole number or a UUID: ``7`` and ``"7"`` are the same key. Anything else is refused, because its
    text may differ from one process to the next.
    """
    # A short cut for ordinary keys. The code below gives the same answer for them.
    if (
        type(value) is str
        and 0 < len(value) <= format.max_length
        and value.isascii()
        and value.isprintable()
        and not value.isspace()
        and (format.pattern is None or format.pattern.fullmatch(value) is not None)
    ):
        return value
    if value is None or (isinstance(value, str) and not value):
        raise KeyMissing("the key is missing: None and the empty text are not keys")
    if isinstance(value, str):
        text = str.__str__(value)  # a StrEnum's or other subclass's characters, not what its __str__ may say
    elif isinstance(value, int) and not isinstance(value, bool):
        if value.bit_length() > 4 * MAX_KEY_LENGTH:  # before it is turned into digits, which takes quadratic time
            raise KeyInvalid(f"the key is a number with more than {format.max_length} digits")
        text = int.__repr__(value)
    elif isinstance(value, UUID):
        text = str(value)
    else:
        raise KeyInvalid(f"a key must be str, int or UUID, not {type(value).__name__}: turn it into text first")
    format.check(text)
    return text


def check_name(what: str, name: object) -> str:
    """Return the name of an operation or step, which is text like a key. Raises PolicyError."""
    try:
        if isinstance(name, str):
            return normalize_key(name)
        raise KeyInvalid("it is not text")
    except RequestError as error:
        raise PolicyError(f"{what} has a name of 1 to 255 printable characters, not {str(name)[:40]!r}") from error


# The header field, RFC 9651. Every pattern below is matched at one position and has one way to match, so the time is
# linear in the length of the field.
_BARE = re.compile(r"[!#-+\--:<-\[\]-~]+")  # printable ASCII without blank, quote, comma, semicolon, backslash
BARE_KEY = re.compile(_BARE.pattern.encode())
"""Matches the bytes of a key that ``auto`` takes as it is, if the format allows its length and has no pattern."""
_QUOTED = r'"[ !#-\[\]-~]*(?:\\["\\][ !#-\[\]-~]*)*"'
_DISPLAY = r'%"(?:[ !#$&-~]|%[0-9a-f]{2})*"'
_BASE64 = "[A-Za-z0-9+/]"
_STRING = re.compile(_QUOTED)
_PARAMETER = re.compile(
    r"; *[a-z*][a-z0-9_.*-]*"
    rf"(?:=(?:{_QUOTED}"
    r"|-?[0-9]{1,12}\.[0-9]{1,3}|-?[0-9]{1,15}"  # a Decimal, an Integer
    r"|@-?[0-9]{1,15}|\?[01]"  # a Date, a Boolean
    r"|[A-Za-z*][!#$%&'*+.^_`|~0-9A-Za-z:/-]*"  # a Token
    rf"|:(?:{_BASE64}{{4}})*(?:{_BASE64}{{2,3}}={{0,2}})?:"  # a Byte Sequence
    rf"|(?P<display>{_DISPLAY})))?"
)
_ESCAPED = re.compile(r"\\(.)")
_PERCENT = re.compile(rb"%(..)")


def parse_header(value: str, mode: HeaderMode = "auto", format: KeyFormat = ANY, name: str = "Idempotency-Key") -> str:
    """Return the key in the value of one ``Idempotency-Key`` field line. Raises KeyInvalid, which says that ``name``.

    ``auto``: a value that starts with a quote must be a Structured Field String, whose parameters are checked and
    ignored; any other value is a bare key. ``strict``: only the String. ``raw``: the value as it is, with quotes.
    """
    text = value.strip(" \t")
    if not text:
        raise KeyInvalid(f"the {name} field is empty")
    if not (text.isascii() and text.isprintable()):
        raise KeyInvalid(f"the {name} field {_abbreviate(text)} holds characters other than printable ASCII")
    if mode not in ("auto", "strict", "raw"):
        raise PolicyError(f"unknown header mode {mode!r}: choose one of auto, strict, raw")
    if mode == "raw":
        key = text
    elif text[0] == '"':
        key = _structured_string(text, name)
    elif mode == "strict":
        raise KeyInvalid(f'the {name} field {_abbreviate(text)} must be a quoted string, like "8e03978e"')
    elif _BARE.fullmatch(text) is None:
        raise KeyInvalid(
            f"the {name} field {_abbreviate(text)} holds a blank, quote, comma, semicolon or backslash: "
            "send one key, and quote it if it needs these characters"
        )
    else:
        key = text
    format.check(key)
    return key


def header_value(key: str, quote: bool = False) -> str:
    """Return the key as a field value: bare, or as a Structured Field String. ``parse_header`` reads both. Raises
    KeyInvalid.
    """
    ANY.check(key)
    if not (key.isascii() and key.isprintable()):
        raise KeyInvalid(f"the key {_abbreviate(key)} cannot travel in a header: it holds more than printable ASCII")
    if quote:
        return '"' + key.replace("\\", "\\\\").replace('"', '\\"') + '"'
    if _BARE.fullmatch(key) is None:
        raise KeyInvalid(
            f"the key {_abbreviate(key)} cannot travel bare: it holds a blank, quote, comma, semicolon or backslash"
        )
    return key


def _structured_string(text: str, name: str) -> str:
    string = _STRING.match(text)
    if string is None:
        raise KeyInvalid(f"the {name} field {_abbreviate(text)} has no closing quote, or a wrong escape")
    at = string.end()
    while at < len(text):
        parameter = _PARAMETER.match(text, at)
        if parameter is None or not _is_utf8(parameter["display"]):
            raise KeyInvalid(f"the {name} field {_abbreviate(text)} goes on wrongly after the closing quote")
        at = parameter.end()
    inner = string[0][1:-1]
    return _ESCAPED.sub(r"\1", inner) if "\\" in inner else inner


def _is_utf8(display: str | None) -> bool:
    """Whether a Display String's escaped bytes are UTF-8, the one rule of the syntax that no pattern can express."""
    try:
        _PERCENT.sub(lambda match: a2b_hex(match[1]), (display or "").encode()[1:]).decode()
    except UnicodeDecodeError:
        return False
    return True


# Each use of the hash has its own ``person``, so that values of different uses never coincide. Copying a hash is faster
# than creating one.
def identity_hash(key: bytes = b"") -> blake2b:
    """Return the empty hash that ``identity`` continues. Without the key of 1 to 64 bytes nobody can compute it."""
    return blake2b(digest_size=16, key=key, person=b"semel.identity.1")


_IDENTITY = identity_hash()


def identity(tenant: str, operation: str, key: str, hash: blake2b = _IDENTITY) -> bytes:
    """Return the record's 16 bytes: BLAKE2b over the three as UTF-8, each preceded by its length in bytes and a colon.

    The lengths keep ("ab", "c") and ("a", "bc") apart, whatever characters a tenant puts into its name. Without a keyed
    ``hash`` a key of few possible values can be found by trying them all.
    """
    text = f"{len(tenant)}:{tenant}{len(operation)}:{operation}{len(key)}:{key}"
    if text.isascii():
        data = text.encode()
    else:  # the lengths in bytes are others
        try:
            a, b, c = tenant.encode(), operation.encode(), key.encode()
        except UnicodeEncodeError as exc:
            raise KeyInvalid("the tenant, the operation or the key holds a lone surrogate") from exc
        data = b"%d:%b%d:%b%d:%b" % (len(a), a, len(b), b, len(c), c)
    digest = hash.copy()
    digest.update(data)
    return digest.digest()


def derive(root: bytes, step: str) -> str:
    """Return the key to send on for one step of an operation: the same in every attempt, another for every step.

    ``root`` is the operation's identity. It is the key of the hash, so that nobody without it can tell which keys
    belong together. The result has the form of a UUID of version 8, which every key format and payment provider
    accepts, and 122 uniform bits. It is a key like any other: the receiver makes its own identity from it and may
    derive again.
    """
    if len(root) != 16:
        raise PolicyError(f"keys are derived from an identity of 16 bytes, not of {len(root)}")
    if not step:
        raise PolicyError("a step needs a name: two steps without one would send the same key")
    try:
        name = step.encode()
    except UnicodeEncodeError as exc:
        raise PolicyError("the step's name holds a lone surrogate") from exc
    return format_uuid(blake2b(name, digest_size=16, key=root, person=b"semel.derive.1").hexdigest(), 8)


def format_uuid(digits: str, version: int) -> str:
    """Return 32 hexadecimal digits in the form of a UUID. Six of their bits give way to its version and variant."""
    variant = "89ab"[int(digits[16], 16) & 3]
    return f"{digits[:8]}-{digits[8:12]}-{version}{digits[13:16]}-{variant}{digits[17:20]}-{digits[20:]}"


def _abbreviate(text: str) -> str:
    return ascii(text[:_ABBREVIATED]) + ("…" if len(text) > _ABBREVIATED else "")
