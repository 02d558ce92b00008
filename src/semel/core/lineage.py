"""Where an operation comes from: the key at the start of the chain of services, and the key of the caller's operation.

Lineage is for people who follow one request through several services. It comes from the client, so it proves nothing:
it is no part of the identity or the fingerprint, nothing is allowed because of it, and a malformed one is ignored. A
store keeps it behind the readable key, where it needs no column of its own: a key has no line breaks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from semel.core.keys import MAX_KEY_LENGTH, header_value, parse_header
from semel.core.ops import Record
from semel.core.values import value
from semel.errors import KeyInvalid

ROOT: Final = "Idempotency-Root"
PARENT: Final = "Idempotency-Parent"
TRACE: Final = "traceparent"
LINEAGE_HEADERS: Final = frozenset(name.lower().encode() for name in (ROOT, PARENT, TRACE))
_TRACE: Final = re.compile("(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")


@value
class Lineage:
    """The lineage of one operation, as its caller sent it."""

    root: str = ""
    """The key of the first operation of the chain. Empty: this is the first."""
    parent: str = ""
    """The key of the operation that made the call."""
    trace: str = ""
    """The caller's ``traceparent`` (W3C Trace Context). It is sent on, and not stored."""


def read_lineage(lines: Mapping[bytes, bytes]) -> Lineage:
    """Return the lineage in a request's header lines. What is malformed is left out."""
    trace = lines.get(b"traceparent", b"").decode("latin-1")
    return Lineage(
        _key(lines.get(b"idempotency-root")),
        _key(lines.get(b"idempotency-parent")),
        trace if _TRACE.fullmatch(trace) else "",
    )


def format_trace(trace: bytes) -> str:
    """Return the ``traceparent`` of a trace, as a snapshot holds it: 16, 8 and 1 bytes. Empty if there is none."""
    return f"00-{trace[:16].hex()}-{trace[16:24].hex()}-{trace[24:].hex()}" if trace else ""


def write_lineage(lineage: Lineage) -> dict[str, str]:
    """Return the headers to send. A key that no header can hold is left out."""
    headers = {ROOT: _text(lineage.root), PARENT: _text(lineage.parent), TRACE: lineage.trace}
    return {name: text for name, text in headers.items() if text}


def lineage_metadata(lineage: Lineage) -> dict[str, str]:
    """Return the headers to send with a message. The names are in lower case: most brokers tell cases apart."""
    return {name.lower(): text for name, text in write_lineage(lineage).items()}


def read_metadata(headers: Mapping[str, str]) -> Lineage:
    """Return the lineage in the headers of a message. What is malformed is left out."""
    return read_lineage({name.encode(): text.encode("latin-1", "replace") for name, text in headers.items()})


def lineage_lines(lineage: Lineage) -> dict[bytes, bytes]:
    """Return the header lines of a lineage, as ``read_lineage`` reads them."""
    return {name.encode(): text.encode() for name, text in lineage_metadata(lineage).items()}


def label(key: str, lines: Mapping[bytes, bytes]) -> str:
    """Return the readable key as it is stored: with root and parent behind it, as far as there is room."""
    lineage = read_lineage(lines)
    if not lineage.root:
        return key
    texts = (f"{key}\n{lineage.root}\n{lineage.parent}", f"{key}\n{lineage.root}\n")
    return next((text for text in texts if len(text) <= MAX_KEY_LENGTH), key)


def read_label(record: Record) -> Record:
    """Return a record from a store with its key, root and parent apart."""
    if record.key is None or "\n" not in record.key:
        return record
    key, _, rest = record.key.partition("\n")
    root, _, parent = rest.partition("\n")
    return replace(record, key=key, root=root, parent=parent or None)


def _key(line: bytes | None) -> str:
    try:
        return "" if line is None else parse_header(line.decode("latin-1"))
    except KeyInvalid:
        return ""


def _text(key: str) -> str:
    for quote in (False, True):
        try:
            return header_value(key, quote) if key else ""
        except KeyInvalid:
            continue
    return ""
