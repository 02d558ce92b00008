from __future__ import annotations

import enum
import re
from hashlib import blake2b
from typing import Any
from uuid import UUID, uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semel.core.keys import (
    MAX_KEY_LENGTH,
    KeyFormat,
    derive,
    header_value,
    identity,
    normalize_key,
    parse_header,
)
from semel.errors import KeyInvalid, KeyMissing, PolicyError

UUID_TEXT = "0f8fad5b-d9cb-469f-a165-70867728950e"
ULID_TEXT = "01ARZ3NDEKTSV4RRFFQ69G5FAV"

any_text = st.text(st.characters(exclude_categories=["Cs"]))
keys = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=MAX_KEY_LENGTH).filter(
    lambda text: not text.isspace()
)
printable_keys = st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), min_size=1, max_size=100).filter(
    lambda text: not text.isspace()
)
bare_keys = st.text(
    st.characters(min_codepoint=0x21, max_codepoint=0x7E, exclude_characters='",;\\'), min_size=1, max_size=100
)


class TestKeyFormat:
    @pytest.mark.parametrize(
        "key",
        [UUID_TEXT, UUID_TEXT.upper(), str(uuid4()), "ffffffff-ffff-ffff-ffff-ffffffffffff"],
        ids=["lower", "upper", "any", "largest"],
    )
    def test_uuid_accepts_every_version_in_either_case(self, key: str) -> None:
        assert normalize_key(key, KeyFormat.named("uuid")) == key

    @pytest.mark.parametrize(
        "key",
        [
            UUID_TEXT.replace("-", ""),
            "{" + UUID_TEXT + "}",
            "urn:uuid:" + UUID_TEXT,
            UUID_TEXT[:-1],
            UUID_TEXT + "0",
            UUID_TEXT + "\n",
            "g" + UUID_TEXT[1:],
            "٠" + UUID_TEXT[1:],
            ULID_TEXT,
        ],
    )
    def test_uuid_refuses_other_spellings(self, key: str) -> None:
        with pytest.raises(KeyInvalid):
            KeyFormat.named("uuid").check(key)

    def test_the_uuid_of_an_unset_variable_is_refused(self) -> None:
        with pytest.raises(KeyInvalid, match="not nil"):
            normalize_key(UUID(int=0), KeyFormat.named("uuid"))

    def test_upper_and_lower_case_are_two_keys(self) -> None:
        upper, lower = (normalize_key(key, KeyFormat.named("uuid")) for key in (UUID_TEXT.upper(), UUID_TEXT))
        assert identity("t", "o", upper) != identity("t", "o", lower)

    @pytest.mark.parametrize("key", [ULID_TEXT, ULID_TEXT.lower(), "7ZZZZZZZZZZZZZZZZZZZZZZZZZ"])
    def test_ulid_accepts(self, key: str) -> None:
        assert normalize_key(key, KeyFormat.named("ulid")) == key

    @pytest.mark.parametrize(
        "key",
        ["8ZZZZZZZZZZZZZZZZZZZZZZZZZ", ULID_TEXT[:-1], ULID_TEXT + "0", *(ULID_TEXT[:-1] + c for c in "ILOUilou-")],
    )
    def test_ulid_refuses(self, key: str) -> None:
        with pytest.raises(KeyInvalid, match="ULID"):
            KeyFormat.named("ulid").check(key)

    def test_an_unknown_name_lists_the_known_ones(self) -> None:
        with pytest.raises(PolicyError, match="any, uuid, ulid"):
            KeyFormat.named("guid")

    def test_a_pattern_must_match_the_whole_key(self) -> None:
        format = KeyFormat.matching(r"ord-\d+")
        format.check("ord-17")
        for key in ("ord-17x", "xord-17", "ord-"):
            with pytest.raises(KeyInvalid, match="matches ord-"):
                format.check(key)

    @pytest.mark.parametrize("pattern", ["(", "[z-a]", "*", 7])
    def test_a_wrong_pattern_is_a_policy_error(self, pattern: Any) -> None:
        with pytest.raises(PolicyError, match="no regular expression"):
            KeyFormat.matching(pattern)

    @pytest.mark.parametrize("length", [0, -1, 256, True, 1.5, None])
    def test_a_wrong_length_is_a_policy_error(self, length: Any) -> None:
        with pytest.raises(PolicyError, match="maximum length"):
            KeyFormat.named("any", max_length=length)

    def test_a_shorter_length_is_kept(self) -> None:
        format = KeyFormat.matching("a+", max_length=3)
        assert normalize_key("aaa", format) == "aaa"
        with pytest.raises(KeyInvalid, match="at most 3"):
            normalize_key("aaaa", format)

    def test_a_slow_pattern_never_meets_a_long_key(self) -> None:
        format = KeyFormat.matching("(a+)+b", max_length=8)
        with pytest.raises(KeyInvalid, match="at most 8"):
            format.check("a" * 5000)

    def test_formats_are_frozen_and_compare_by_value(self) -> None:
        format = KeyFormat.matching("a+")
        assert format == KeyFormat.matching("a+")
        assert len({format, KeyFormat.matching("a+"), KeyFormat.named("any")}) == 2
        with pytest.raises(AttributeError):
            format.name = "b"  # type: ignore[misc]

    @given(st.text(min_size=20))
    def test_an_error_never_shows_the_whole_key(self, tail: str) -> None:
        with pytest.raises(KeyInvalid) as caught:
            KeyFormat.named("uuid").check("secret-\x00\n" + tail)
        message = str(caught.value)
        assert message.removesuffix("…").isprintable()
        assert tail not in message


class TestNormalizeKey:
    @given(keys)
    def test_text_is_kept_as_it_is(self, key: str) -> None:
        assert normalize_key(key) == key

    def test_numbers_and_uuids_become_text(self) -> None:
        assert normalize_key(17) == "17"
        assert normalize_key(-1) == "-1"
        assert normalize_key(0) == "0"
        assert normalize_key(UUID(UUID_TEXT)) == UUID_TEXT

    def test_a_subclass_counts_as_what_it_holds(self) -> None:
        class Colour(str, enum.Enum):  # noqa: UP042 - its str() is not its text, which a StrEnum's is
            RED = "red"

        class Loud(str):
            __slots__ = ()

            def __str__(self) -> str:
                return self.upper()

        class Level(enum.IntEnum):
            HIGH = 3

        found = [normalize_key(value) for value in (Colour.RED, Loud("abc"), Level.HIGH)]
        assert found == ["red", "abc", "3"]
        assert {type(key) for key in found} == {str}

    @pytest.mark.parametrize("value", [None, ""])
    def test_missing_key_is_not_hashed_as_if_it_were_one(self, value: object) -> None:
        with pytest.raises(KeyMissing):
            normalize_key(value)

    @pytest.mark.parametrize("value", [True, False, 1.5, b"abc", ["a"], ("a", 1), {}, object(), float("nan")])
    def test_other_types_are_refused_with_advice(self, value: object) -> None:
        with pytest.raises(KeyInvalid, match=rf"not {type(value).__name__}: turn it into text"):
            normalize_key(value)

    @pytest.mark.parametrize("value", ["a\x00b", "a\nb", "\x7f", "\x85", "a\ud800", "\t"])
    def test_what_breaks_databases_and_headers_is_refused(self, value: str) -> None:
        with pytest.raises(KeyInvalid, match="control character or a lone surrogate"):
            normalize_key(value)

    @pytest.mark.parametrize("value", [" ", "   ", "\u2003"])
    def test_blanks_alone_are_no_key(self, value: str) -> None:
        with pytest.raises(KeyInvalid, match="blanks"):
            normalize_key(value)

    def test_the_length_is_bounded(self) -> None:
        assert normalize_key("k" * 255) == "k" * 255
        assert normalize_key("ü" * 255) == "ü" * 255
        for value in ("k" * 256, "k" * 10_000, "ü" * 256):
            with pytest.raises(KeyInvalid, match="at most 255"):
                normalize_key(value)
        for number in (10**255, 10**100_000):
            with pytest.raises(KeyInvalid, match="255"):
                normalize_key(number)

    def test_the_format_applies_to_every_type(self) -> None:
        format = KeyFormat.matching("[0-9]+")
        assert normalize_key(17, format) == normalize_key("17", format) == "17"
        with pytest.raises(KeyInvalid):
            normalize_key(-17, format)
        with pytest.raises(KeyInvalid):
            normalize_key(UUID(UUID_TEXT), format)


class TestParseHeader:
    @pytest.mark.parametrize(
        ("value", "key"),
        [
            (UUID_TEXT, UUID_TEXT),
            (f'"{UUID_TEXT}"', UUID_TEXT),
            (f' \t"{UUID_TEXT}" \t', UUID_TEXT),
            (f"\t{UUID_TEXT} ", UUID_TEXT),
            ('"a b"', "a b"),
            ('" a "', " a "),
            ('"a,b;c"', "a,b;c"),
            (r'"a\"b\\c"', r"a\b\c".replace(r"\b", '"b')),
            ("!#$%&'()*+-./:<=>?@[]^_`{|}~", "!#$%&'()*+-./:<=>?@[]^_`{|}~"),
            ("'k'", "'k'"),
        ],
    )
    def test_auto_reads(self, value: str, key: str) -> None:
        assert parse_header(value) == key

    def test_quoted_and_bare_are_the_same_key(self) -> None:
        assert parse_header('"k"') == parse_header("k") == parse_header(' "k";a=1')

    @pytest.mark.parametrize(
        "parameters",
        [
            ";a",
            ";a;b",
            ";  a=1",
            ";*a-b_c.d*=?0",
            ";a=-999999999999999",
            ";a=123456789012.123",
            ';a="x\\"y;z"',
            ";a=tok/en:1",
            ";a=*",
            ";a=::",
            ";a=:aGk=:",
            ";a=:aGk:",
            ";a=@1659578233",
            ";a=@-1",
            ';a=%"f%c3%bc r"',
            ';a=1;b="2";c',
        ],
    )
    @pytest.mark.parametrize("mode", ["auto", "strict"])
    def test_parameters_are_ignored(self, parameters: str, mode: Any) -> None:
        assert parse_header('"k"' + parameters, mode) == "k"

    @pytest.mark.parametrize(
        "rest",
        [
            ";",
            "; ",
            ";A",
            ";1",
            ";a=",
            ";a=;b",
            " ;a",
            ";a =1",
            ";a=1 ;b",
            ";a=1.",
            ";a=.5",
            ";a=1.2345",
            ";a=1234567890123.1",
            ";a=1234567890123456",
            ";a=--1",
            ";a=?2",
            ";a=:a:",
            ";a=:aGk",
            ";a=:a-k=:",
            ";a=@1.5",
            ";a=@",
            ';a="x',
            ';a="\\x"',
            ';a=%"%C3%BC"',
            ';a=%"%ff"',
            ';a=%"%c3"',
            ';a=%"x',
            ";a=(1)",
            ";a=,",
            "x",
            '"',
            ' "l"',
            ',"l"',
            ", l",
        ],
    )
    def test_what_follows_the_string_must_be_parameters(self, rest: str) -> None:
        with pytest.raises(KeyInvalid, match="closing quote"):
            parse_header('"k"' + rest)

    @pytest.mark.parametrize(
        "value",
        [
            *("", " ", "\t \t", '""', '"', '"abc', '"abc\\"', '"a\\bc"', '"abc\\', '"a"b"', '"  "'),
            *("a b", "a,b", "a;b", "a\\b", 'a"b', 'k"', "k, l", '"k", "l"', "k;a=1"),
            *("ké", '"ké"', "k\x00", "k\r\nX: y", '"k\x7f"', "k\ud800", "k\xa0", '"k";\ta'),
        ],
    )
    def test_malformed_values_are_refused_and_never_ignored(self, value: str) -> None:
        with pytest.raises(KeyInvalid):
            parse_header(value)

    def test_two_joined_lines_are_no_key(self) -> None:
        with pytest.raises(KeyInvalid):
            parse_header(f"{UUID_TEXT}, {UUID_TEXT}")

    def test_the_length_counts_the_key_and_not_its_spelling(self) -> None:
        assert parse_header('"' + '\\"' * 255 + '";a=1') == '"' * 255
        for value in ("k" * 256, '"' + "k" * 256 + '"', '"' + '\\"' * 256 + '"'):
            with pytest.raises(KeyInvalid, match="at most 255"):
                parse_header(value)

    def test_strict_wants_the_string(self) -> None:
        assert parse_header('"k"', "strict") == "k"
        with pytest.raises(KeyInvalid, match="quoted string"):
            parse_header("k", "strict")

    def test_raw_takes_the_value_as_it_stands(self) -> None:
        assert parse_header(' "k" ', "raw") == '"k"'
        assert parse_header("a, b;c\\", "raw") == "a, b;c\\"
        for value in ("", "  ", "é", "a\x00", "k" * 256):
            with pytest.raises(KeyInvalid):
                parse_header(value, "raw")

    def test_an_unknown_mode_is_a_policy_error(self) -> None:
        with pytest.raises(PolicyError, match="auto, strict, raw"):
            parse_header("k", "lenient")  # type: ignore[arg-type]

    def test_the_format_is_checked_on_the_key_itself(self) -> None:
        format = KeyFormat.named("uuid")
        assert parse_header(f'"{UUID_TEXT}"', format=format) == UUID_TEXT
        with pytest.raises(KeyInvalid, match="UUID"):
            parse_header('"k"', format=format)

    @given(st.text(max_size=60) | st.text('"\\;=:%@?*a1. \t,-', max_size=60))
    def test_any_value_gives_a_key_or_key_invalid(self, value: str) -> None:
        try:
            key = parse_header(value)
        except KeyInvalid:
            return
        assert normalize_key(key) == key
        assert parse_header(header_value(key, quote=True)) == key

    @pytest.mark.parametrize(
        "value",
        [
            *('"' + "\\" * 100_001, '"k"' + ";a" * 50_000 + "!", '"k";a=:' + "a" * 100_000, '"k";a="' + "x" * 100_000),
            *('"k";a=%"' + "%20" * 30_000, '"k";' + " " * 100_000, '"k";a=' + "1" * 100_000, "k" * 100_000 + " "),
        ],
        ids=lambda value: value[:10],
    )
    def test_hostile_lengths_end_in_an_error(self, value: str) -> None:
        with pytest.raises(KeyInvalid) as caught:
            parse_header(value)
        assert len(str(caught.value)) < 200


class TestHeaderValue:
    @given(printable_keys)
    def test_quoted_round_trip(self, key: str) -> None:
        for mode in ("auto", "strict"):
            assert parse_header(header_value(key, quote=True), mode) == key

    @given(bare_keys)
    def test_bare_round_trip(self, key: str) -> None:
        assert header_value(key) == key
        assert parse_header(header_value(key)) == key

    @pytest.mark.parametrize("key", ["a b", "a,b", "a;b", 'a"b', "a\\b"])
    def test_what_cannot_travel_bare_can_travel_quoted(self, key: str) -> None:
        with pytest.raises(KeyInvalid, match="cannot travel bare"):
            header_value(key)
        assert parse_header(header_value(key, quote=True)) == key

    @pytest.mark.parametrize("key", ["", "é", "a\r\nSet-Cookie: x", "\x00", "k" * 256, "  "])
    @pytest.mark.parametrize("quote", [False, True])
    def test_what_cannot_travel_at_all_is_refused(self, key: str, quote: bool) -> None:
        with pytest.raises(KeyInvalid):
            header_value(key, quote=quote)


class TestIdentity:
    def test_its_bytes_never_change(self) -> None:
        # Records outlive releases: another value here means that every stored key is forgotten.
        plain = b"4:acme4:ship3:k\xc3\xa9"
        assert identity("acme", "ship", "ké") == blake2b(plain, digest_size=16, person=b"semel.identity.1").digest()
        assert identity("acme", "ship", "k-1").hex() == "2a548f7d5acbc5a2725e02b8bb2eed95"

    @given(st.tuples(any_text, any_text, any_text), st.tuples(any_text, any_text, any_text))
    def test_different_scopes_never_meet(self, one: tuple[str, str, str], other: tuple[str, str, str]) -> None:
        assert (identity(*one) == identity(*other)) == (one == other)

    @given(st.lists(st.sampled_from(["a", "b", ":", "0", "1", "2", "é", "\x00"]), max_size=6))
    def test_moving_a_boundary_changes_the_identity(self, letters: list[str]) -> None:
        text = "".join(letters)
        cuts = [(i, j) for i in range(len(text) + 1) for j in range(i, len(text) + 1)]
        assert len({identity(text[:i], text[i:j], text[j:]) for i, j in cuts}) == len(cuts)

    def test_the_same_key_of_two_tenants_or_operations_is_two_records(self) -> None:
        scopes = [("alice", "pay", "k"), ("bob", "pay", "k"), ("alice", "refund", "k")]
        assert len({identity(*scope) for scope in scopes}) == 3

    @pytest.mark.parametrize("parts", [("\ud800", "o", "k"), ("t", "\ud800", "k"), ("t", "o", "\ud800")])
    def test_a_lone_surrogate_is_refused(self, parts: tuple[str, str, str]) -> None:
        with pytest.raises(KeyInvalid, match="surrogate"):
            identity(*parts)


class TestDerive:
    root = identity("acme", "ship", "k-1")

    def test_its_text_never_changes(self) -> None:
        # A retry after an upgrade must send the provider the same key.
        assert derive(self.root, "charge") == "e3986716-d727-85ca-9352-e500f50defb1"

    @given(st.binary(min_size=16, max_size=16), any_text.filter(bool))
    def test_it_is_a_uuid_of_version_8(self, root: bytes, step: str) -> None:
        key = derive(root, step)
        parsed = UUID(key)
        assert str(parsed) == key
        assert parsed.version == 8
        assert parsed.variant == "specified in RFC 4122"
        assert derive(root, step) == key
        assert normalize_key(key, KeyFormat.named("uuid")) == key
        assert header_value(key) == key

    @given(st.sets(st.tuples(st.binary(min_size=16, max_size=16), any_text.filter(bool)), max_size=30))
    def test_every_root_and_step_has_its_own(self, pairs: set[tuple[bytes, str]]) -> None:
        assert len({derive(root, step) for root, step in pairs}) == len(pairs)

    @given(any_text.filter(bool), any_text.filter(bool))
    def test_a_chain_is_not_one_long_step(self, first: str, second: str) -> None:
        chained = derive(UUID(derive(self.root, first)).bytes, second)
        joined = {derive(self.root, first + glue + second) for glue in ("", "/", ".", ":", "\x00")}
        assert chained not in joined
        assert chained not in {derive(self.root, first), derive(self.root, second)}

    def test_all_free_bits_vary(self) -> None:
        numbers = [UUID(derive(self.root, f"step {number}")).int for number in range(200)]
        ones = zeros = 0
        for number in numbers:
            ones |= number
            zeros |= ~number
        fixed = (0xF << 76) | (0x3 << 62)
        assert (ones & zeros) & ((1 << 128) - 1) == ((1 << 128) - 1) & ~fixed

    def test_it_is_another_domain_than_identity(self) -> None:
        derived = UUID(derive(self.root, "k")).bytes
        assert derived[:6] != identity("", "", "k")[:6]
        assert derived[:6] != blake2b(b"k", digest_size=16, key=self.root, person=b"semel.identity.1").digest()[:6]

    @pytest.mark.parametrize("root", [b"", b"x" * 15, b"x" * 17])
    def test_a_root_is_16_bytes(self, root: bytes) -> None:
        with pytest.raises(PolicyError, match="16 bytes"):
            derive(root, "charge")

    @pytest.mark.parametrize("step", ["", "\ud800"])
    def test_a_step_has_a_name(self, step: str) -> None:
        with pytest.raises(PolicyError):
            derive(self.root, step)


def test_the_documented_ceiling_is_255() -> None:
    assert MAX_KEY_LENGTH == 255
    assert re.fullmatch("k{255}", normalize_key("k" * MAX_KEY_LENGTH))
