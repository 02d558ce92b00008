"""Encrypted snapshots open with their key, in their record, unchanged; and in no other way."""

from __future__ import annotations

import asyncio
import copy
import pickle
import sqlite3
import sys
import zlib
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semel import AsyncOperation, AsyncSemel, AsyncSQLiteStore, Operation, Semel, SQLiteStore, current_operation
from semel.codec import KEY_BYTES, Codec, KeyRing
from semel.core.encoding.snapshot import NOT_SEALED, Kind
from semel.errors import ConfigurationError, MissingDependency, PolicyError, SnapshotUnreadable
from tests.engine.driving import Engine

pytest.importorskip("cryptography")

ID, OTHER = bytes(16), bytes(range(16))
OLD, NEW = b"o" * KEY_BYTES, b"n" * KEY_BYTES
RING = KeyRing({"2026-10": OLD})
CODEC = Codec(RING)


@given(st.binary(), st.binary(max_size=32))
def test_what_is_encrypted_is_decrypted(payload: bytes, context: bytes) -> None:
    assert RING.decrypt(RING.encrypt(payload, context), context) == payload
    assert CODEC.open(CODEC.seal(Kind.VALUE, "json", payload, context), context) == (Kind.VALUE, "json", payload)


def test_nothing_of_the_payload_shows_and_no_two_are_alike() -> None:
    secret = b"card 4242 4242 4242 4242"
    blobs = {CODEC.seal(Kind.RESPONSE, "", secret, ID) for _ in range(50)}
    assert len(blobs) == 50
    assert not any(b"4242" in blob for blob in blobs)


@pytest.mark.slow
@pytest.mark.parametrize("payload", [b"", b'{"id": "p_1"}', b"abc" * 1000], ids=len)
def test_every_cut_and_every_changed_byte_is_refused(payload: bytes) -> None:
    blob = CODEC.seal(Kind.VALUE, "json", payload, ID)
    raw = RING.encrypt(payload[:40], ID)
    for at in range(len(blob)):
        for change in (0x01, 0x80, 0xFF):
            with pytest.raises(SnapshotUnreadable):
                CODEC.open(blob[:at] + bytes((blob[at] ^ change,)) + blob[at + 1 :], ID)
        with pytest.raises(SnapshotUnreadable):
            CODEC.open(blob[:at], ID)
    for at in range(len(raw)):  # by the cipher alone, without the help of the checksum
        for change in range(1, 256):
            with pytest.raises(SnapshotUnreadable):
                RING.decrypt(raw[:at] + bytes((raw[at] ^ change,)) + raw[at + 1 :], ID)
        with pytest.raises(SnapshotUnreadable):
            RING.decrypt(raw[:at], ID)


@given(st.binary(max_size=80) | st.binary(max_size=80).map(lambda tail: b"\x01\x072026-10" + tail))
def test_random_ciphertexts_are_refused(ciphertext: bytes) -> None:
    with pytest.raises(SnapshotUnreadable):
        RING.decrypt(ciphertext, ID)


def test_a_snapshot_does_not_open_in_another_record() -> None:
    blob = CODEC.seal(Kind.VALUE, "json", b"{}", ID)
    with pytest.raises(SnapshotUnreadable, match="belongs to another record"):
        CODEC.open(blob, OTHER)


@pytest.mark.parametrize(("kind", "name"), [(Kind.ERROR, "json"), (Kind.VALUE, "typed")])
def test_a_snapshot_cannot_be_passed_off_as_another_kind(kind: Kind, name: str) -> None:
    blob = CODEC.seal(Kind.VALUE, "json", b"{}", ID)
    header = bytes((1, kind, blob[2], len(name))) + name.encode()
    payload = blob[4 + 4 + 4 :]
    with pytest.raises(SnapshotUnreadable, match="does not open"):
        CODEC.open(header + zlib.crc32(payload, zlib.crc32(header)).to_bytes(4, "big") + payload, ID)


def test_keys_rotate_without_losing_records() -> None:
    before = CODEC.seal(Kind.VALUE, "json", b"1", ID)
    ring = KeyRing({"2026-11": NEW, "2026-10": OLD}, active="2026-11")
    codec = Codec(ring)
    after = codec.seal(Kind.VALUE, "json", b"2", ID)
    assert ring.active == "2026-11"
    assert codec.open(before, ID).payload == b"1"
    assert codec.open(after, ID).payload == b"2"
    with pytest.raises(SnapshotUnreadable, match="key '2026-11', which is not in the ring: add that key"):
        CODEC.open(after, ID)
    only_new = Codec(KeyRing({"2026-11": NEW}))
    assert only_new.open(after, ID).payload == b"2"
    with pytest.raises(SnapshotUnreadable, match="'2026-10', which is not in the ring"):
        only_new.open(before, ID)


def test_another_key_under_the_same_id_does_not_open_it() -> None:
    blob = CODEC.seal(Kind.VALUE, "json", b"1", ID)
    with pytest.raises(SnapshotUnreadable, match="another key has that id"):
        Codec(KeyRing({"2026-10": NEW})).open(blob, ID)


def test_with_a_cipher_a_snapshot_in_clear_is_refused_and_the_error_says_what_to_do() -> None:
    clear = Codec().seal(Kind.VALUE, "json", b"forged", ID)
    with pytest.raises(SnapshotUnreadable, match=r"not encrypted.*accept_plain=True"):
        CODEC.open(clear, ID)
    with pytest.raises(SnapshotUnreadable, match="not encrypted"):
        CODEC.open(Codec(compress_above=10).seal(Kind.VALUE, "json", b"x" * 500, ID), ID)
    migrating = Codec(cipher=RING, accept_plain=True)
    assert migrating.open(clear, ID).payload == b"forged"
    sealed = migrating.seal(Kind.VALUE, "json", b"new", ID)
    assert CODEC.open(sealed, ID).payload == b"new"
    with pytest.raises(SnapshotUnreadable, match="no cipher is configured"):
        Codec().open(sealed, ID)


def test_that_a_result_could_not_be_sealed_is_read_in_clear_and_nothing_else_is() -> None:
    assert CODEC.open(NOT_SEALED, ID).reason == "its result could not be sealed"
    with pytest.raises(SnapshotUnreadable, match="not encrypted"):
        CODEC.open(Codec().seal_empty("its result could be forged", ID), ID)


def test_a_snapshot_opens_only_in_its_own_entry() -> None:
    entries = ("", "~step:charge", "~step:refund", "charge", "~input", "~failed")
    sealed = {entry: CODEC.seal(Kind.VALUE, "json", b"1", ID, entry) for entry in entries}
    for entry, blob in sealed.items():
        assert CODEC.open(blob, ID, entry).payload == b"1"
        for other in entries:
            if other != entry:
                with pytest.raises(SnapshotUnreadable, match="another record or step"):
                    CODEC.open(blob, ID, other)


def _older(payload: bytes, kind: Kind = Kind.VALUE) -> bytes:
    """A snapshot as it was encrypted before the name of its entry was part of it."""
    header = bytes((1, kind, 0x80, 4)) + b"json"
    sealed = RING.encrypt(payload, ID + header)
    return header + zlib.crc32(sealed, zlib.crc32(header)).to_bytes(4, "big") + sealed


def test_older_snapshots_still_open_and_no_newer_one_can_be_made_into_one() -> None:
    assert CODEC.open(_older(b"old"), ID).payload == b"old"
    assert CODEC.open(_older(b"old"), ID, "~step:charge").payload == b"old"
    with pytest.raises(SnapshotUnreadable):
        CODEC.open(_older(b"old"), OTHER)
    blob = CODEC.seal(Kind.VALUE, "json", b"new", ID, "~step:charge")
    header, sealed = blob[:2] + b"\x80" + blob[3:8], blob[12:]
    with pytest.raises(SnapshotUnreadable, match="does not open"):
        CODEC.open(header + zlib.crc32(sealed, zlib.crc32(header)).to_bytes(4, "big") + sealed, ID, "~step:charge")


def test_a_result_in_clear_is_not_replayed(quick_engine: Engine) -> None:
    sealed = quick_engine.new_guard(codec=CODEC)
    quick_engine.run(lambda: "forged")  # by a guard without a cipher: so could anybody with write access
    with pytest.raises(SnapshotUnreadable, match="not encrypted"):
        quick_engine.run(lambda: "ran again", guard=sealed)
    migrating = quick_engine.new_guard(codec=Codec(RING, accept_plain=True))
    assert quick_engine.run(lambda: "ran again", guard=migrating) == "forged"


def test_steps_and_captured_values_in_clear_are_not_used(quick_engine: Engine) -> None:
    sealed = quick_engine.new_guard(codec=CODEC)

    def body() -> Iterator[Any]:
        op: Any = current_operation()
        yield op.capture("amount", lambda: 5) if op.key == "captured" else op.step("charge", lambda: 5)
        raise KeyError

    for key in ("captured", "step"):
        with pytest.raises(KeyError):
            quick_engine.run(body, key=key)
        with pytest.raises(SnapshotUnreadable, match="not encrypted"):
            quick_engine.run(body, key=key, guard=sealed)


@pytest.mark.parametrize("awaited", [False, True], ids=["sync", "async"])
def test_the_entries_of_one_record_cannot_be_exchanged(awaited: bool, tmp_path: Path) -> None:
    path = tmp_path / "records.db"
    fails = True

    def sync_body(op: Operation) -> list[int]:
        found = [op.capture("low", lambda: 1), op.capture("high", lambda: 1000)]
        if fails:
            raise KeyError
        return found

    async def async_body(op: AsyncOperation) -> list[int]:
        found = [await op.capture("low", lambda: 1), await op.capture("high", lambda: 1000)]
        if fails:
            raise KeyError
        return found

    def run() -> Any:
        if awaited:
            async_guard = AsyncSemel(AsyncSQLiteStore(path), codec=CODEC, sweep_every=None)

            async def main() -> Any:
                try:
                    return await async_guard.run("pay", key="k", call=async_body)
                finally:
                    await async_guard.close()

            return asyncio.run(main())
        guard = Semel(SQLiteStore(path), codec=CODEC, sweep_every=None)
        try:
            return guard.run("pay", key="k", call=sync_body)
        finally:
            guard.close()

    with pytest.raises(KeyError):
        run()
    with closing(sqlite3.connect(path)) as raw, raw:
        values = dict(raw.execute("SELECT name, value FROM semel_step").fetchall())
        for name, other in (("low", "high"), ("high", "low")):
            raw.execute("UPDATE semel_step SET value = ? WHERE name = ?", (values[other], name))
    fails = False
    with pytest.raises(SnapshotUnreadable, match="another record or step"):
        run()
    with closing(sqlite3.connect(path)) as raw, raw:
        for name, value in values.items():
            raw.execute("UPDATE semel_step SET value = ? WHERE name = ?", (value, name))
    assert run() == [1, 1000]


@pytest.mark.parametrize("compression", ["zlib", "zstd"])
def test_payloads_are_compressed_before_they_are_encrypted(compression: Any) -> None:
    pytest.importorskip("zstandard")
    codec = Codec(cipher=RING, compression=compression)
    blob = codec.seal(Kind.VALUE, "json", b"abc" * 5000, ID)
    assert len(blob) < 300
    assert codec.open(blob, ID).payload == b"abc" * 5000


@pytest.mark.parametrize(
    ("keys", "active"),
    [
        ({}, None),
        ({}, "a"),
        ({"a": OLD}, "b"),
        ({"a": OLD, "b": NEW}, None),
        ({"a": OLD[:16]}, "a"),
        ({"a": OLD + b"x"}, "a"),
        ({"a": b""}, "a"),
        ({"a": "o" * KEY_BYTES}, "a"),
        ({"": OLD}, ""),
        ({"é": OLD}, "é"),
        ({"a" * 65: OLD}, None),
        ({"a": OLD, "b": b"short"}, "a"),
        ({7: OLD}, 7),
    ],
)
def test_a_ring_that_cannot_be_meant_is_refused_and_shows_no_key(keys: Any, active: Any) -> None:
    with pytest.raises(PolicyError) as caught:
        KeyRing(keys, active)
    assert isinstance(caught.value, ConfigurationError)
    assert "oooo" not in str(caught.value)
    assert "short" not in str(caught.value)


def test_keys_never_show_and_never_leave_the_process() -> None:
    assert repr(RING) == "KeyRing(ids=['2026-10'], active='2026-10')"
    assert "oooo" not in repr(CODEC) + str(RING)
    for leave in (pickle.dumps, copy.deepcopy):
        with pytest.raises(TypeError, match="not pickled"):
            leave(RING)


def test_generated_keys_fit_and_differ() -> None:
    one, two = KeyRing.generate_key(), KeyRing.generate_key()
    assert one != two
    ring = KeyRing({"a": one, "b": two}, "b")
    assert ring.decrypt(ring.encrypt(b"x", ID), ID) == b"x"


def test_a_missing_package_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers.aead", None)
    with pytest.raises(MissingDependency, match=r"semel\[encryption\]"):
        KeyRing({"a": OLD})
