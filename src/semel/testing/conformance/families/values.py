"""Values: all bytes, texts, sizes and durations that the library allows are stored and returned unchanged."""

from __future__ import annotations

import unicodedata

from semel.core.ops import FOREVER, Complete, Lookup, Release, Renew
from semel.core.states import State
from semel.errors import RecordTooLarge
from semel.testing.conformance.phrases import claim, running, shown, won
from semel.testing.conformance.script import TTL, Elsewhere, Family, Script, new_id

FAMILY = Family("values")

TEXTS = (
    "",
    " ",
    "plain",
    "x" * 255,
    "é" * 255,
    "\U0001f4b8" * 255,
    "\u202eright to left\u202c",
    unicodedata.normalize("NFD", "Ångström"),
    "'; DROP TABLE semel_record; --",
    'it\'s "quoted" `so`',
    "100% %s %(name)s %%",
    ":id :now $1 ? {{word}} {0}",
    "back\\slash \\x00 \\' \\",
    "tab\tand\nnew\r\nline",
    '[1, {"a": null}]',
    "\ufeffmark",
    "\x7f\x01",
)
SNAPSHOTS = (b"", b"\x00", b"\\x00", bytes(range(256)), b"\xff" * 1000, b"'")
LARGE = bytes(range(256)) * 4096


@FAMILY()
def any_snapshot_comes_back() -> Script:
    for snapshot in SNAPSHOTS:
        id, claimed = yield from running()
        assert (yield Complete(id, claimed.token, snapshot, TTL)) is True
        record = yield from shown(claim(id), State.DONE)
        assert record.snapshot == snapshot
        assert (yield Elsewhere(Lookup(id))).snapshot == snapshot


@FAMILY()
def a_large_snapshot_comes_back_or_is_refused_as_such() -> Script:
    """A store with a limit raises RecordTooLarge. The owner keeps its attempt, and may store something smaller."""
    id, claimed = yield from running()
    snapshot = LARGE
    try:
        assert (yield Complete(id, claimed.token, LARGE, TTL)) is True
    except RecordTooLarge:
        yield from shown(claim(id), State.RUNNING)
        snapshot = b"done"
        assert (yield Complete(id, claimed.token, snapshot, TTL)) is True
    assert (yield from shown(claim(id), State.DONE)).snapshot == snapshot
    assert (yield Elsewhere(Lookup(id))).snapshot == snapshot


@FAMILY()
def any_text_comes_back() -> Script:
    for text in TEXTS:
        id = new_id()
        yield from won(claim(id, tenant=text, operation=text, key=text))
        record = yield Elsewhere(Lookup(id))
        assert (record.tenant, record.operation, record.key) == (text, text, text)


@FAMILY()
def a_key_that_is_not_kept_is_none_and_not_empty() -> Script:
    for key in (None, ""):
        id = new_id()
        yield from won(claim(id, key=key))
        assert (yield Lookup(id)).key == key


@FAMILY()
def any_fingerprint_comes_back() -> Script:
    for fingerprint in (b"", b"\x00" * 16, b"\xff" * 32, bytes(range(64))):
        id = new_id()
        yield from won(claim(id, fingerprint=fingerprint))
        assert (yield Lookup(id)).fingerprint == fingerprint
        assert (yield from shown(claim(id), State.RUNNING)).fingerprint == fingerprint


@FAMILY()
def fingerprints_are_told_apart_to_the_last_byte() -> Script:
    id = new_id()
    claimed = yield from won(claim(id, fingerprint=b"f" * 16))
    assert (yield Release(id, claimed.token, State.ABANDONED)) is True
    for other in (b"f" * 15, b"f" * 17, b"f" * 15 + b"\x00", b"F" * 16, b"\x00"):
        yield from shown(claim(id, fingerprint=other), State.ABANDONED)
    assert (yield from won(claim(id, fingerprint=b"f" * 16))).attempt == 2


@FAMILY()
def any_nonce_is_remembered() -> Script:
    for nonce in (0, 1, 2**32, 2**53 + 1, 2**63 - 1):
        id = new_id()
        first = yield from won(claim(id, nonce=nonce))
        assert (yield from won(claim(id, nonce=nonce))).token == first.token
        yield from shown(claim(id, nonce=nonce - 1 if nonce else 1), State.RUNNING)


@FAMILY()
def tokens_are_exact() -> Script:
    """A store that stores numbers as doubles would accept a token that differs by one."""
    id, claimed = yield from running()
    for token in (claimed.token - 1, claimed.token + 1):
        assert (yield Renew(id, token, TTL)) is False
    assert (yield Renew(id, claimed.token, TTL)) is True


@FAMILY()
def any_duration_is_taken() -> Script:
    for seconds in (0.000_001, 0.001, 0.5, 1, 86400.0, 1e9 + 0.123456, FOREVER):
        id = new_id()
        claimed = yield from won(claim(id, lease=0.000_001))
        assert (yield Renew(id, claimed.token, seconds)) is True
        record = yield Lookup(id)
        assert seconds - 60 < record.lease_left <= seconds
        assert (yield Complete(id, claimed.token, b"answer", seconds)) is True
        if seconds > 60:
            assert seconds - 60 < (yield Lookup(id)).expires_in <= seconds
