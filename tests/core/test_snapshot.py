"""The envelope: what is sealed is opened unchanged, or refused; nothing in between, whatever the bytes are."""

from __future__ import annotations

import hashlib
import sys
import zlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semel.codec import ZSTD, Codec
from semel.core.encoding.plain import PLAIN
from semel.core.encoding.serializers import ERROR_LIMIT, decode_error, encode_error
from semel.core.encoding.snapshot import (
    COMPRESS_ABOVE,
    ZLIB,
    Envelope,
    Kind,
    NotSerializable,
    SnapshotTooLarge,
    StoredResponse,
    decode_response,
    encode_response,
)
from semel.errors import MissingDependency, PolicyError, RememberedFailure, SemelError, SnapshotUnreadable

ID = bytes(range(16))
CODEC = Codec()
COMPRESSIBLE = b'{"id": "p_1", "amount": 100}' * 200


def forged(version: int = 1, kind: int = 1, coding: int = 0, name: bytes = b"json", payload: bytes = b"{}") -> bytes:
    """A snapshot with a right checksum, whatever else is wrong with it."""
    header = bytes((version, kind, coding, len(name))) + name
    if version == 2:  # as a database writes it
        return header + hashlib.sha256(header + payload).digest()[:4] + payload
    return header + zlib.crc32(payload, zlib.crc32(header)).to_bytes(4, "big") + payload


# ------------------------------------------------------------------------------------------------- the envelope


@given(st.sampled_from(Kind), st.text(st.characters(codec="ascii"), max_size=32), st.binary(), st.binary(max_size=16))
def test_what_is_sealed_is_opened_unchanged(kind: Kind, name: str, payload: bytes, context: bytes) -> None:
    snapshot = CODEC.open(CODEC.seal(kind, name, payload, context), context)
    assert snapshot == (kind, name, payload)
    assert snapshot.kind is kind


def test_the_stored_form_is_this_one() -> None:
    """Records outlive versions: what was written once must be readable for ever."""
    stored = bytes.fromhex("010100046a736f6e3b1229f87b7d")
    assert CODEC.seal(Kind.VALUE, "json", b"{}", ID) == stored
    assert CODEC.open(stored, ID) == (Kind.VALUE, "json", b"{}")
    assert {kind.name: kind.value for kind in Kind} == {"VALUE": 1, "ERROR": 2, "EMPTY": 3, "RESPONSE": 4}


def test_a_driver_may_hand_out_a_memoryview() -> None:
    blob: Any = memoryview(CODEC.seal(Kind.VALUE, "json", b"{}", ID))
    assert CODEC.open(blob, ID).payload == b"{}"


def test_an_empty_snapshot_has_a_reason_of_bounded_length() -> None:
    opened = CODEC.open(CODEC.seal_empty("the result is a generator", ID), ID)
    assert opened.kind is Kind.EMPTY
    assert opened.reason == "the result is a generator"
    assert len(CODEC.open(CODEC.seal_empty("é\ud800" * 5000, ID), ID).reason) == 200
    assert CODEC.open(CODEC.seal(Kind.VALUE, "json", b"{}", ID), ID).reason == ""


@pytest.mark.parametrize("payload", [b"", b"{}", COMPRESSIBLE], ids=len)
def test_every_cut_and_every_changed_byte_is_refused(payload: bytes) -> None:
    blob = CODEC.seal(Kind.VALUE, "json", payload, ID)
    for end in range(len(blob)):
        with pytest.raises(SnapshotUnreadable):
            CODEC.open(blob[:end], ID)
    for at in range(len(blob)):
        for change in (0x01, 0x80, 0xFF):
            with pytest.raises(SnapshotUnreadable):
                CODEC.open(blob[:at] + bytes((blob[at] ^ change,)) + blob[at + 1 :], ID)
    with pytest.raises(SnapshotUnreadable):
        CODEC.open(blob + b"\0", ID)


@given(st.binary(max_size=60) | st.binary(max_size=60).map(lambda tail: b"\x01\x01\x01\x04json" + tail))
def test_random_bytes_are_refused(blob: bytes) -> None:
    with pytest.raises(SnapshotUnreadable):
        CODEC.open(blob, ID)


@given(st.integers(0, 255), st.integers(0, 255), st.integers(0, 255), st.binary(max_size=8), st.binary(max_size=40))
def test_a_right_checksum_over_nonsense_raises_nothing_foreign(
    version: int, kind: int, coding: int, name: bytes, payload: bytes
) -> None:
    try:
        opened = CODEC.open(forged(version, kind, coding, name, payload), ID)
    except SnapshotUnreadable:
        return
    assert version in (1, 2)
    assert (coding, opened) == (coding & 0x01, (kind, name.decode("ascii"), opened.payload))


@pytest.mark.parametrize(
    ("blob", "words"),
    [
        (forged(version=3), "version 3.*upgrade"),
        (forged(version=0), "version 0"),
        (forged(kind=9), "unknown kind 9"),
        (forged(coding=3), "compression 3"),
        (forged(coding=0x40), "unknown coding 0x40"),
        (forged(coding=1), "zlib says"),
        (forged(coding=0x80), "encrypted and no cipher is configured"),
        (forged(name=b"\xff"), "not ascii"),
        (b"", "cut"),
    ],
)
def test_the_refusal_says_why(blob: bytes, words: str) -> None:
    with pytest.raises(SnapshotUnreadable, match=words) as caught:
        CODEC.open(blob, ID)
    assert isinstance(caught.value, SemelError)
    assert caught.value.code == "idempotency_snapshot_unreadable"


@pytest.mark.parametrize("name", ["x" * 33, "é"])
def test_a_serializer_name_that_does_not_fit_is_refused(name: str) -> None:
    with pytest.raises(PolicyError):
        CODEC.seal(Kind.VALUE, name, b"", ID)


# -------------------------------------------------------------------------------------------------- compression


@pytest.mark.parametrize("compression", ["zlib", "zstd"])
def test_large_payloads_are_stored_smaller_and_open_in_every_codec(compression: Any) -> None:
    pytest.importorskip("zstandard")
    blob = Codec(compression=compression).seal(Kind.VALUE, "json", COMPRESSIBLE, ID)
    assert len(blob) < len(COMPRESSIBLE) / 10
    assert blob[2] == {"zlib": 1, "zstd": 2}[compression]
    for reader in ("zlib", "zstd", None):
        assert Codec(compression=reader).open(blob, ID).payload == COMPRESSIBLE


def test_compression_is_tried_only_above_the_size_and_kept_only_when_smaller() -> None:
    assert CODEC.seal(Kind.VALUE, "json", b"a" * COMPRESS_ABOVE, ID)[2] == 0
    assert CODEC.seal(Kind.VALUE, "json", b"a" * (COMPRESS_ABOVE + 1), ID)[2] == 1
    incompressible = b"".join(hashlib.sha256(bytes((i,))).digest() for i in range(100))
    blob = CODEC.seal(Kind.VALUE, "json", incompressible, ID)
    assert blob[2] == 0
    assert CODEC.open(blob, ID).payload == incompressible
    assert Codec(compression=None).seal(Kind.VALUE, "json", COMPRESSIBLE, ID)[2] == 0


@pytest.mark.parametrize("limit", [len(COMPRESSIBLE), len(COMPRESSIBLE) - 1])
@pytest.mark.parametrize("compression", ["zlib", "zstd"])
def test_a_bomb_does_not_expand_beyond_the_limit(compression: Any, limit: int) -> None:
    pytest.importorskip("zstandard")
    blob = Codec(compression=compression).seal(Kind.VALUE, "json", COMPRESSIBLE, ID)
    codec = Codec(compression=compression, limit=limit)
    if limit == len(COMPRESSIBLE):
        assert codec.open(blob, ID).payload == COMPRESSIBLE
    else:
        with pytest.raises(SnapshotUnreadable, match=f"limit of {limit} bytes"):
            codec.open(blob, ID)


def test_a_zstd_bomb_that_hides_its_size_is_refused() -> None:
    zstandard = pytest.importorskip("zstandard")
    bomb = zstandard.ZstdCompressor(write_content_size=False).compress(b"\0" * 10_000_000)
    codec = Codec(limit=1_000_000)
    with pytest.raises(SnapshotUnreadable):
        codec.open(forged(coding=2, payload=bomb), ID)
    small = zstandard.ZstdCompressor(write_content_size=False).compress(b"\0" * 1_000_000)
    assert codec.open(forged(coding=2, payload=small), ID).payload == b"\0" * 1_000_000


@pytest.mark.parametrize("coding", [1, 2])
def test_a_compressed_payload_that_is_cut_or_has_a_tail_is_refused(coding: int) -> None:
    pytest.importorskip("zstandard")
    codec = Codec()
    compressed = (ZLIB if coding == 1 else ZSTD).compress(COMPRESSIBLE)
    assert codec.open(forged(coding=coding, payload=compressed), ID).payload == COMPRESSIBLE
    for wrong in (*(compressed[:end] for end in range(len(compressed))), compressed + b"x", compressed * 2):
        with pytest.raises(SnapshotUnreadable):
            codec.open(forged(coding=coding, payload=wrong), ID)


def test_zstd_is_named_when_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("zstandard")
    blob = Codec(compression="zstd").seal(Kind.VALUE, "json", COMPRESSIBLE, ID)
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(MissingDependency, match=r"semel\[zstd\]"):
        Codec(compression="zstd")
    with pytest.raises(MissingDependency, match=r"semel\[zstd\]"):
        Codec().open(blob, ID)
    with pytest.raises(SnapshotUnreadable, match="compression 2"):
        Envelope().open(blob, ID)


def test_what_could_not_be_opened_again_is_not_sealed() -> None:
    codec = Codec(limit=10)
    assert codec.open(codec.seal(Kind.VALUE, "json", b"x" * 10, ID), ID).payload == b"x" * 10
    assert issubclass(SnapshotTooLarge, NotSerializable)  # so the engine remembers the operation without its result
    with pytest.raises(SnapshotTooLarge, match=r"11 bytes.*limit is 10"):
        codec.seal(Kind.VALUE, "json", b"x" * 11, ID)


@pytest.mark.parametrize("settings", [{"limit": 0}, {"compress_above": -1}, {"accept_plain": True}])
def test_a_codec_that_cannot_be_meant_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(PolicyError):
        Codec(**settings)


def test_an_unknown_compression_is_refused() -> None:
    with pytest.raises(PolicyError, match="'lzma'"):
        Codec(compression="lzma")  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------ HTTP answers

lines = st.lists(st.tuples(st.binary(max_size=20), st.binary(max_size=60)), max_size=8)


@given(st.integers(100, 999), lines, st.binary())
def test_answers_come_back_byte_for_byte(status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
    assert decode_response(encode_response(status, headers, body)) == StoredResponse(status, headers, body, False)


def test_repeated_header_lines_stay_apart_and_in_order() -> None:
    headers = [(b"Link", b"<a>"), (b"ETag", b'"1"'), (b"link", b"<b>"), (b"Link", b"")]
    assert decode_response(encode_response(201, headers, b"\x00\xff")).headers == headers


def test_an_omitted_body_is_not_an_empty_one() -> None:
    assert decode_response(encode_response(200, [], b"", body_omitted=True)).body_omitted is True
    assert decode_response(encode_response(200, [], b"")).body_omitted is False
    with pytest.raises(ValueError, match="omitted body is empty"):
        encode_response(200, [], b"x", body_omitted=True)


@pytest.mark.parametrize(
    ("status", "headers"), [(99, []), (1000, []), (-1, []), (200, [(b"x" * 65536, b"")]), (200, [(b"", b"")] * 65536)]
)
def test_what_is_no_answer_is_refused(status: int, headers: list[tuple[bytes, bytes]]) -> None:
    with pytest.raises(ValueError):
        encode_response(status, headers, b"")


def test_a_cut_or_lengthened_answer_is_refused() -> None:
    payload = encode_response(200, [(b"a", b"b"), (b"c", b"d")], b"body")
    for wrong in (*(payload[:end] for end in range(len(payload))), payload + b"x", b"\x02" + payload[1:]):
        with pytest.raises(SnapshotUnreadable):
            decode_response(wrong)


@given(st.binary(max_size=60))
def test_random_answers_raise_nothing_foreign(payload: bytes) -> None:
    try:
        answer = decode_response(payload)
    except SnapshotUnreadable:
        return
    assert answer.body == payload[len(payload) - len(answer.body) :]


# ---------------------------------------------------------------------------------------------------- failures


class PaymentError(Exception):
    pass


class Declined(PaymentError):
    """Takes other arguments than it hands to its base, as most exceptions in real programs do."""

    def __init__(self, code: str, amount: int) -> None:
        super().__init__(f"declined: {code}")
        self.code = code
        self.amount = amount


class Doubling(PaymentError):
    """Would say "declined: declined: x" if it were simply called with its args again."""

    def __init__(self, code: str) -> None:
        super().__init__(f"declined: {code}")


class Slotted(PaymentError):
    __slots__ = ("code",)

    def __init__(self, code: str) -> None:
        super().__init__(f"slot: {code}")
        self.code = code


class Holding(PaymentError):
    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.connection = object()


class Keyword(PaymentError):
    def __init__(self, *, code: int) -> None:
        super().__init__(code)


class Reducing(PaymentError):
    """Says itself how it is rebuilt, as for pickle: by something that is not its class."""

    def __reduce__(self) -> Any:
        return print, ("never called",)


class Unreducible(PaymentError):
    def __reduce__(self) -> Any:
        raise TypeError("no")


class Mute(PaymentError):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def remembered(exc: BaseException, *allowed: type[BaseException]) -> BaseException:
    return decode_error(encode_error(exc), allowed)


@pytest.mark.parametrize(
    "exc",
    [
        ValueError("x"),
        ValueError(),
        KeyError("k"),
        PaymentError("a", 1, (2, b"x"), None),
        Declined("05", 100),
        Doubling("x"),
        Keyword(code=7),
        Mute("m"),
        FileNotFoundError(2, "No such file", "a.txt"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"),
        ImportError("x", name="n", path="p"),
        SystemExit(3),
    ],
    ids=repr,
)
def test_allowed_failures_are_raised_again_as_they_were(exc: BaseException) -> None:
    own = PaymentError if isinstance(exc, PaymentError) else type(exc)
    for allowed in ((type(exc),), (BaseException, own), (KeyboardInterrupt, Exception, SystemExit, own)):
        again = remembered(exc, *allowed)
        assert type(again) is type(exc)
        assert again.args == exc.args
        assert vars(again) == vars(exc)
        assert repr(again) == repr(exc)


def test_attributes_come_back_too() -> None:
    again = remembered(Declined("05", 100), PaymentError)
    assert isinstance(again, Declined)
    assert (again.code, again.amount, str(again)) == ("05", 100, "declined: 05")
    error = remembered(FileNotFoundError(2, "No such file", "a.txt"), OSError)
    assert isinstance(error, FileNotFoundError)
    assert error.filename == "a.txt"


@pytest.mark.parametrize(
    ("exc", "allowed"),
    [
        (ValueError("x"), ()),
        (ValueError("x"), (KeyError, PaymentError)),
        (PaymentError("x"), (Declined,)),
        (PaymentError("x"), (Exception,)),
        (Declined("05", 100), (BaseException, KeyError)),
        (Slotted("x"), (PaymentError,)),
        (Holding("x"), (KeyError,)),
        (Reducing("x"), (PaymentError,)),
        (Unreducible("x"), (PaymentError,)),
        (PaymentError(object()), (PaymentError,)),
        (ExceptionGroup("g", [ValueError("x")]), (Exception,)),
    ],
    ids=lambda value: repr(value).partition(" at 0x")[0],
)
def test_other_failures_are_remembered_by_name_and_message(
    exc: Exception, allowed: tuple[type[BaseException], ...]
) -> None:
    again = remembered(exc, *allowed)
    assert type(again) is RememberedFailure
    assert again.type_name.endswith(type(exc).__qualname__)
    assert again.message == str(exc)


def test_what_an_exception_holds_beside_its_words_may_be_lost_but_the_words_are_not() -> None:
    again = remembered(Holding("x"), PaymentError)
    assert type(again) is RememberedFailure
    assert again.message == "x"


@pytest.mark.slow
def test_of_a_huge_failure_the_beginning_is_kept() -> None:
    payload = encode_error(ValueError("\x00" * 10_000_000))
    assert len(payload) < ERROR_LIMIT
    again = decode_error(payload, (ValueError,))
    assert type(again) is RememberedFailure
    assert again.message == "\x00" * (ERROR_LIMIT // 8)
    large = ValueError("x", "y" * (ERROR_LIMIT // 3))
    assert repr(remembered(large, ValueError)) == repr(large)


def test_two_loaded_classes_of_one_name_are_not_guessed_between() -> None:
    def make() -> type[PaymentError]:
        class Twin(PaymentError):
            pass

        return Twin

    one, two = make(), make()
    assert type(remembered(one("x"), PaymentError)) is RememberedFailure
    assert type(remembered(two("x"), two)) is two


@pytest.mark.parametrize(
    "name", ["this.Zen", "antigravity.X", "os.system", "builtins.eval", "eval", "subprocess.Popen"]
)
def test_no_failure_is_looked_up_by_a_name_from_the_store(name: str) -> None:
    for args in ((), ("echo",), None):
        again = decode_error(PLAIN.encode([name, "m", args, None]), (BaseException,))
        assert type(again) is RememberedFailure
        assert again.type_name == name
    assert not {"this", "antigravity"} & set(sys.modules)


@pytest.mark.parametrize(
    "payload", [b"", b"1", b"[]", b"[1,2,3,4]", b'["a"]', b'{"a":1}', b'["a",1,null,null]', b"null"]
)
def test_a_corrupt_failure_is_unreadable(payload: bytes) -> None:
    with pytest.raises(SnapshotUnreadable):
        decode_error(payload, (BaseException,))


def test_a_failure_with_forged_parts_is_still_only_that_failure() -> None:
    for args, state in (("x", None), ([1], None), ((1,), 7), ((1,), {"args": 5}), ((1,), {"__class__": "x"})):
        again = decode_error(PLAIN.encode(["ValueError", "m", args, state]), (ValueError,))
        assert type(again) is RememberedFailure


def test_a_snapshot_that_the_database_completed_is_opened() -> None:
    begun = CODEC.begin_clear(Kind.VALUE, "json")
    assert begun is not None
    blob = forged(version=2, payload=b'[{"id": 1}]')
    assert blob.startswith(begun)
    assert CODEC.open(blob, ID) == (Kind.VALUE, "json", b'[{"id": 1}]')
    for at in range(len(blob)):
        with pytest.raises(SnapshotUnreadable):
            CODEC.open(blob[:at] + bytes((blob[at] ^ 1,)) + blob[at + 1 :], ID)


def test_the_database_completes_no_snapshot_that_must_be_encrypted() -> None:
    from semel.codec import KeyRing

    assert Codec(cipher=KeyRing({"k": b"0" * 32})).begin_clear(Kind.VALUE, "json") is None
