"""The layout of a record, which is one Redis string: a fixed header, the fields that never change, steps or snapshot.

::

     1  version (1)           1   1 byte
     2  state                     1 running, 2 done, 3 unknown
     3  takeover                  0 retry, 1 reject, 2 recover
     4  awaited                   1 if somebody waits: whoever ends the attempt publishes
        or, if done, confirmed    how many replicas confirmed it, plus 128 if the disk did; 0: nobody asked
     5  token, nonce              8 bytes each
    21  attempt                   4
    25  created                   8, microseconds of the server's clock as the claimer knew it: for display
    33  lease_rest, ttl_rest      8 each: milliseconds of the key's life that are left when the lease, the ttl, ends
    49  expires                   8, microseconds of the server's clock: for replays, whose single command has no PTTL
    57  size                      4, of the next fields: fingerprint, tenant, operation, key, each with its length
    61  …
        the steps (name and value, each with its length), or the snapshot if done

All numbers are big-endian. The Lua files read the same layout (``lua/record.lua``). This module knows no connection.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Final

from semel.core.ops import Claim, Record
from semel.core.states import State, Takeover
from semel.errors import ConfigurationError

NOT_A_RECORD: Final = (
    "a key of the store holds something else: give Semel a prefix of its own, RedisStore(url, prefix=…)"
)
FAR: Final = 31_622_400_000_000
"""A thousand years in ms: the extra life of a key whose outcome may be unknown, as in ``lua/record.lua``."""
HEAD: Final = struct.Struct(">BBBBQQIQQQQI")
_HEAD_SIZE: Final = HEAD.size
_RETRY: Final = Takeover.RETRY  # a local name: finding an Enum member in its class is slow on Python 3.11
_LENGTHS: Final = struct.Struct(">IIi")
_BYTE: Final = tuple(bytes((number,)) for number in range(256))
_SIZE: Final = struct.Struct(">I")
_VERSION: Final = 1
_EIGHT: Final = struct.Struct(">Q")
eight_bytes: Final[Callable[[int], bytes]] = _EIGHT.pack
"""Packs a token, a nonce or an instant as the record holds it."""
RUNNING: Final = b"\x01"
"""The second byte of a record that is running."""
_STATES: Final = (State.ABSENT, State.RUNNING, State.DONE, State.UNKNOWN)
_ENDED: Final = struct.Struct(">4xQ8xIQ16xQI")
"""Reads token, attempt, created, expires and size from the header."""


def milliseconds(seconds: float) -> int:
    """Convert seconds, rounded down: a lease must not look longer than requested."""
    return int(seconds * 1000)


def token_of(raw: bytes) -> int:
    token: int = _EIGHT.unpack(raw)[0]
    return token


def new_value(claim: Claim, token: int, now: int) -> tuple[bytes, int]:
    """Return the value that a first claim writes, and the life of its key in ms."""
    lease, ttl = int(claim.lease * 1000), int(claim.ttl * 1000) or 1  # as milliseconds() does
    life = lease if lease > ttl else ttl
    if claim.takeover is not _RETRY:
        life += FAR
    fingerprint, key = claim.fingerprint, claim.key
    try:
        tenant, operation, key_bytes = claim.tenant.encode(), claim.operation.encode(), (key or "").encode()
    except UnicodeEncodeError:  # half a surrogate pair: stored as it is
        texts = (claim.tenant, claim.operation, key or "")
        tenant, operation, key_bytes = (text.encode("utf-8", "surrogatepass") for text in texts)
    lengths = _LENGTHS.pack(len(tenant), len(operation), -1 if key is None else len(key_bytes))
    size = 1 + len(fingerprint) + len(lengths) + len(tenant) + len(operation) + len(key_bytes)
    head = HEAD.pack(_VERSION, 1, claim.takeover, 0, token, claim.nonce, 1, now, life - lease, life - ttl, 0, size)
    return b"".join((head, _BYTE[len(fingerprint)], fingerprint, lengths, tenant, operation, key_bytes)), life


def state_of_value(value: bytes) -> State:
    """Return the stored state; raise ConfigurationError if the value is not one of our records."""
    if len(value) < HEAD.size or value[0] != _VERSION:
        raise ConfigurationError(NOT_A_RECORD)
    return _STATES[value[1]]


def confirmation(replicas: int, aof: bool) -> int:
    """Return the byte that says who has confirmed a result."""
    return min(replicas, 127) | (128 if aof else 0)


def is_confirmed(value: bytes, by: int) -> bool:
    """Whether this value may be returned when ``by`` must have confirmed it. Only results need to be confirmed."""
    return value[1] != State.DONE or (value[3] & 127 >= by & 127 and value[3] & 128 >= by & 128)


def replay_record(claim: Claim, value: bytes, now: int) -> Record:
    """Return the record that a claim found, if it is not running: the path of every replay.

    Tenant, operation and key are taken from the claim, because the identity is made of them. Everything else is the
    same as in ``record_of``.
    """
    if len(value) < _HEAD_SIZE or value[0] != _VERSION:
        state_of_value(value)
    token, attempt, created, expires, size = _ENDED.unpack_from(value)
    state = _STATES[value[1]]
    at = HEAD.size + 1 + value[HEAD.size]
    return Record(
        claim.id,
        state,
        token,
        attempt,
        value[HEAD.size + 1 : at],
        value[HEAD.size + size :] if state is State.DONE else None,
        0.0,
        max(0, now - created) / 1e6,
        (expires - now) / 1e6,
        claim.tenant,
        claim.operation,
        claim.key,
    )


def record_of(id: bytes, value: bytes, now: int, left: float, lease_left: float) -> Record:
    """Return the record as readers see it. ``left`` and ``lease_left`` are seconds, from the life of the key."""
    state = state_of_value(value)
    token, attempt, created, _, size = _ENDED.unpack_from(value)
    if state is State.RUNNING and lease_left <= 0:
        state = State.ABANDONED
    at = HEAD.size + 1 + value[HEAD.size]
    fingerprint = value[HEAD.size + 1 : at]
    tenant_size, operation_size, key_size = _LENGTHS.unpack_from(value, at)
    at += _LENGTHS.size
    tenant = value[at : at + tenant_size]
    at += tenant_size
    operation = value[at : at + operation_size]
    at += operation_size
    key = value[at : at + key_size].decode("utf-8", "surrogatepass") if key_size >= 0 else None
    return Record(
        id,
        state,
        token,
        attempt,
        fingerprint,
        value[HEAD.size + size :] if state is State.DONE else None,
        lease_left if state in (State.RUNNING, State.ABANDONED) else min(lease_left, 0.0),
        max(0, now - created) / 1e6,
        left,
        tenant.decode("utf-8", "surrogatepass"),
        operation.decode("utf-8", "surrogatepass"),
        key,
    )


def steps_of(raw: bytes) -> tuple[tuple[str, bytes], ...]:
    """Return the steps that an attempt has saved, in order."""
    steps = []
    at = 0
    while at < len(raw):
        (size,) = _SIZE.unpack_from(raw, at)
        name = raw[at + 4 : at + 4 + size].decode("utf-8", "surrogatepass")
        at += 4 + size
        (size,) = _SIZE.unpack_from(raw, at)
        steps.append((name, raw[at + 4 : at + 4 + size]))
        at += 4 + size
    return tuple(steps)


def may_need_sweep(head: bytes) -> bool:
    """Whether the record is running and must not be run again. Then its times decide."""
    return len(head) >= HEAD.size and head[0] == _VERSION and head[1] == State.RUNNING and head[2] != Takeover.RETRY


def needs_sweep(head: bytes, pttl: int) -> bool:
    """Whether a sweep should mark this record as unknown: its lease and its ttl are over."""
    lease_rest, ttl_rest = HEAD.unpack_from(head)[8:10]
    return bool(pttl <= lease_rest and pttl <= ttl_rest)
