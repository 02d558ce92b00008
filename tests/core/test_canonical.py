from __future__ import annotations

import dataclasses
import enum
import itertools
import json
import struct
import subprocess
import sys
from collections import Counter, OrderedDict, defaultdict, namedtuple
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal, localcontext
from pathlib import PurePosixPath
from typing import Any
from uuid import UUID

import msgspec
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from semel.core.encoding.canonical import (
    LIVE,
    MAX_DEPTH,
    LiveObject,
    canonical_json,
    encode_value,
    parse_json,
    select_fields,
)
from semel.errors import DocumentError, PolicyError, SemelError


def canonicalize(document: bytes) -> bytes:
    return canonical_json(parse_json(document))


text = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | text
documents = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(text, inner, max_size=4), max_leaves=20
)

# RFC 8785, appendix B.
NUMBERS = """
0000000000000000 0
8000000000000000 0
0000000000000001 5e-324
8000000000000001 -5e-324
7fefffffffffffff 1.7976931348623157e+308
ffefffffffffffff -1.7976931348623157e+308
4340000000000000 9007199254740992
c340000000000000 -9007199254740992
4430000000000000 295147905179352830000
44b52d02c7e14af5 9.999999999999997e+22
44b52d02c7e14af6 1e+23
44b52d02c7e14af7 1.0000000000000001e+23
444b1ae4d6e2ef4e 999999999999999700000
444b1ae4d6e2ef4f 999999999999999900000
444b1ae4d6e2ef50 1e+21
3eb0c6f7a0b5ed8c 9.999999999999997e-7
3eb0c6f7a0b5ed8d 0.000001
41b3de4355555553 333333333.3333332
41b3de4355555554 333333333.33333325
41b3de4355555555 333333333.3333333
41b3de4355555556 333333333.3333334
41b3de4355555557 333333333.33333343
becbf647612f3696 -0.0000033333333333333333
43143ff3c1cb0959 1424953923781206.2
"""


def shuffled(value: Any) -> Any:
    """The same document with the members of every object turned round."""
    if isinstance(value, dict):
        return {name: shuffled(value[name]) for name in reversed(list(value))}
    if isinstance(value, list):
        return [shuffled(element) for element in value]
    return value


def as_doubles(document: str) -> Any:
    return json.loads(document, parse_int=float)


class TestNumbers:
    @pytest.mark.parametrize(("bits", "expected"), [line.split() for line in NUMBERS.split("\n") if line])
    def test_the_vectors_of_the_rfc(self, bits: str, expected: str) -> None:
        (value,) = struct.unpack(">d", bytes.fromhex(bits))
        assert canonical_json(value) == expected.encode()

    @pytest.mark.parametrize("bits", ["7fffffffffffffff", "7ff0000000000000", "fff0000000000000"])
    def test_nan_and_infinity_are_refused(self, bits: str) -> None:
        with pytest.raises(DocumentError, match="NaN"):
            canonical_json(list(struct.unpack(">d", bytes.fromhex(bits))))

    @given(st.floats(allow_nan=False, allow_infinity=False))
    def test_every_double_reads_back(self, value: float) -> None:
        assert as_doubles(canonical_json(value).decode()) == value

    @pytest.mark.parametrize("spelling", [b"1", b"1.0", b"1e0", b"10E-1", b"0.1e+1", b" 1 "])
    def test_the_spelling_of_a_number_does_not_matter(self, spelling: bytes) -> None:
        assert canonicalize(spelling) == b"1"

    @pytest.mark.parametrize("spelling", [b"0", b"-0", b"0.0", b"-0.0", b"-0e5"])
    def test_minus_zero_is_zero(self, spelling: bytes) -> None:
        assert canonicalize(spelling) == b"0"

    def test_ids_beyond_2_53_that_differ_in_the_last_digit_stay_two(self) -> None:
        ids = [b"9007199254740992", b"9007199254740993", b"18446744073709551615", b"18446744073709551616"]
        assert [canonicalize(number) for number in ids] == ids
        assert canonical_json(-(2**63)) == b"-9223372036854775808"

    @pytest.mark.parametrize(
        "document", [b"1e400", b"-1e400", b"9" * 311, b"9" * 310, b"9" * 100_000, b"[-" + b"9" * 400 + b"]"], ids=len
    )
    def test_numbers_out_of_range_are_refused(self, document: bytes) -> None:
        with pytest.raises(DocumentError, match="out of range"):
            canonicalize(document)
        with pytest.raises(DocumentError, match="out of range"):
            canonical_json(2**1024)


class TestJson:
    def test_the_example_of_the_rfc(self) -> None:
        document = rb"""{
          "numbers": [333333333.33333329, 1E30, 4.50, 2e-3, 0.000000000000000000000000001],
          "string": "\u20ac$\u000F\u000aA'\u0042\u0022\u005c\\\"\/",
          "literals": [null, true, false]
        }"""
        expected = (
            '{"literals":[null,true,false],"numbers":[333333333.3333333,1e+30,4.5,0.002,1e-27],'
            r'"string":"€$\u000f\nA'
            "'"
            r'B\"\\\\\"/"}'
        )
        assert canonicalize(document) == expected.encode()

    def test_names_are_sorted_by_utf_16_units(self) -> None:
        document = rb"""{
          "\u20ac": "Euro Sign", "\r": "Carriage Return", "\ufb33": "Hebrew Letter Dalet With Dagesh", "1": "One",
          "\ud83d\ude00": "Emoji: Grinning Face", "\u0080": "Control",
          "\u00f6": "Latin Small Letter O With Diaeresis"
        }"""
        assert list(json.loads(canonicalize(document)).values()) == [
            "Carriage Return",
            "One",
            "Control",
            "Latin Small Letter O With Diaeresis",
            "Euro Sign",
            "Emoji: Grinning Face",
            "Hebrew Letter Dalet With Dagesh",
        ]

    def test_text_is_escaped_only_where_it_must_be(self) -> None:
        assert canonical_json("".join(map(chr, range(0x20)))) == (
            rb'"\u0000\u0001\u0002\u0003\u0004\u0005\u0006\u0007\b\t\n\u000b\f\r\u000e\u000f'
            rb"\u0010\u0011\u0012\u0013\u0014\u0015\u0016\u0017\u0018\u0019\u001a\u001b\u001c\u001d\u001e\u001f" + b'"'
        )
        assert canonical_json('"\\/\x7f\u2028é😀<') == '"\\"\\\\/\x7f\u2028é😀<"'.encode()

    @given(documents)
    def test_json_key_order_and_blanks_do_not_change_the_form(self, document: Any) -> None:
        form = canonical_json(document)
        assert canonicalize(json.dumps(document).encode()) == form
        assert canonicalize(json.dumps(shuffled(document), indent=2, ensure_ascii=False).encode()) == form

    @given(documents)
    def test_the_form_is_its_own_form_and_the_same_document(self, document: Any) -> None:
        form = canonical_json(document)
        assert canonicalize(form) == form
        assert as_doubles(form.decode()) == as_doubles(json.dumps(document))

    @pytest.mark.parametrize("empty", [b"{}", b"[]", b'""', b"0", b"false", b"null", b"[[]]", b'{"":{}}'])
    def test_empty_values_stay_what_they_are(self, empty: bytes) -> None:
        assert canonicalize(empty) == empty

    @pytest.mark.parametrize("document", [b'{"a":1,"a":1}', b'{"a":1,"\\u0061":2}', b'[{"b":{"a":1,"c":2,"a":3}}]'])
    def test_a_name_that_occurs_twice_is_refused(self, document: bytes) -> None:
        with pytest.raises(DocumentError, match="occurs twice"):
            canonicalize(document)

    @pytest.mark.parametrize(
        "document",
        [
            *(b"", b" ", b"{", b"[1,]", b"{'a':1}", b"nul", b"1 2", b"01", b"+1", b".5", b"1.", b"NaN", b"-Infinity"),
            b'"a\nb"',
            b'"\\x"',
            b'"\\u12"',
            b"\xff",
            b'"\xc3"',
            b'"\xed\xa0\x80"',
            b"\xef\xbb\xbf1",
            "1".encode("utf-16"),
        ],
    )
    def test_what_is_not_json_is_refused(self, document: bytes) -> None:
        with pytest.raises(DocumentError, match="not a JSON document") as caught:
            canonicalize(document)
        assert isinstance(caught.value, SemelError)
        assert isinstance(caught.value, ValueError)
        assert caught.value.status == 400

    @pytest.mark.parametrize("document", [rb'"\ud800"', rb'{"\udc00":1}', rb'["\ude00\ud83d"]'])
    def test_lone_surrogates_are_refused(self, document: bytes) -> None:
        with pytest.raises(DocumentError, match="surrogate"):
            canonicalize(document)

    @pytest.mark.parametrize(("opening", "closing"), [(b"[", b"]"), (b'{"a":', b"}"), (b'[{"a":', b"}]")])
    def test_nesting_is_bounded(self, opening: bytes, closing: bytes) -> None:
        levels = MAX_DEPTH // (2 if len(closing) == 2 else 1)
        fits = opening * levels + b"1" + closing * levels
        assert canonicalize(fits) == fits
        for deeper in (levels + 1, 2000, 200_000):
            with pytest.raises(DocumentError, match="nests deeper"):
                canonicalize(opening * deeper + b"1" + closing * deeper)

    def test_hostile_brackets_do_not_exhaust_the_stack(self) -> None:
        with pytest.raises(DocumentError):
            canonicalize(b"[" * 1_000_000)
        itself: list[Any] = []
        itself.append(itself)
        with pytest.raises(DocumentError, match="nests deeper"):
            canonical_json(itself)

    @pytest.mark.parametrize("value", [{1: 2}, {"a": 1, 2: 3}, {None: 1}, {"é": 1, b"x": 2}])
    def test_names_must_be_text(self, value: Any) -> None:
        with pytest.raises(DocumentError, match="must be text"):
            canonical_json(value)

    @pytest.mark.parametrize("value", [b"x", {1, 2}, Decimal(1), object(), datetime(2024, 1, 1)])
    def test_what_json_does_not_have_is_refused(self, value: Any) -> None:
        with pytest.raises(DocumentError, match=f"JSON has no {type(value).__name__}"):
            canonical_json([value])


ORDER: dict[str, Any] = {
    "amount": 5,
    "note": None,
    "card": {"number": "4242", "cvv": "123"},
    "items": [{"sku": "a", "n": 1}, {"sku": "b", "n": 2}, {"n": 3}],
}


class TestSelectFields:
    @pytest.mark.parametrize(
        ("only", "expected"),
        [
            (["amount"], {"amount": 5}),
            (["note"], {"note": None}),
            (["missing"], ORDER),
            (["amount.cents"], ORDER),
            (["missing", "amount"], {"amount": 5}),
            (["card"], {"card": ORDER["card"]}),
            (["card.number", "amount"], {"amount": 5, "card": {"number": "4242"}}),
            (["card", "card.number"], {"card": ORDER["card"]}),
            (["card.number", "card"], {"card": ORDER["card"]}),
            (["card.pin"], ORDER),
            (["card.pin", "note"], {"note": None}),
            (["items.*.pin"], ORDER),
            (["items.*.pin", "amount"], {"amount": 5, "items": [{}, {}, {}]}),
            (["card.*"], {"card": ORDER["card"]}),
            (["items.*.sku"], {"items": [{"sku": "a"}, {"sku": "b"}, {}]}),
            (["items.sku"], ORDER),
            (["items.*"], {"items": ORDER["items"]}),
            (["*.number", "card.cvv"], {"card": ORDER["card"]}),
        ],
    )
    def test_only(self, only: list[str], expected: Any) -> None:
        assert select_fields(ORDER, include=only) == expected

    def test_documents_of_which_nothing_is_chosen_differ(self) -> None:
        bodies: list[Any] = [{}, {"x": 1}, {"x": 2}, {"items": [{"n": 1}]}, {"items": [{"n": 2}]}, [1], [2], 1, 2]
        forms = [canonical_json(select_fields(body, include=["amount", "items.*.sku"])) for body in bodies]
        assert len(set(forms)) == len(bodies)

    @pytest.mark.parametrize("choice", ["include", "exclude"])
    def test_a_deep_document_does_not_exhaust_the_stack(self, choice: Any) -> None:
        deep: Any = 1
        for level in range(600):
            deep = {"a": deep} if level % 2 else [deep]
        document = {"amount": 5, "rest": deep}
        expected = {"amount": 5} if choice == "include" else {"rest": deep}
        assert select_fields(document, **{choice: ["amount", "rest.b.*.c"]}) == expected
        assert select_fields(deep, **{choice: ["amount"]}) == deep

    def test_an_absent_field_is_not_null(self) -> None:
        forms = [canonical_json(select_fields(body, include=["note"])) for body in ({}, {"note": None}, {"note": ""})]
        assert len(set(forms)) == 3

    def test_lists_keep_their_length(self) -> None:
        bodies: list[dict[str, Any]] = [{"items": [{}] * count} for count in (2, 3, 0)]
        forms = [canonical_json(select_fields(body, include=["items.*.sku"])) for body in [*bodies, {}]]
        assert len(set(forms)) == 4

    @pytest.mark.parametrize(
        ("without", "expected"),
        [
            (["missing"], ORDER),
            (["card", "items", "note"], {"amount": 5}),
            (["card.cvv", "items"], {"amount": 5, "note": None, "card": {"number": "4242"}}),
            (["*.cvv", "items.*.sku"], {**ORDER, "card": {"number": "4242"}, "items": [{"n": 1}, {"n": 2}, {"n": 3}]}),
            (["card.*", "items.*"], {"amount": 5, "note": None, "card": {}, "items": []}),
            (["amount.cents"], ORDER),
        ],
    )
    def test_without(self, without: list[str], expected: Any) -> None:
        assert select_fields(ORDER, exclude=without) == expected

    def test_both_in_turn(self) -> None:
        assert select_fields(ORDER, include=["card"], exclude=["card.cvv"]) == {"card": {"number": "4242"}}

    def test_top_level_lists_and_scalars(self) -> None:
        assert select_fields([{"a": 1, "b": 2}], include=["*.a"]) == [{"a": 1}]
        assert select_fields(5, include=["a"]) == 5
        assert select_fields(5, exclude=["a"]) == 5

    @given(documents)
    def test_no_choice_changes_nothing_and_no_choice_changes_the_document(self, document: Any) -> None:
        before = canonical_json(document)
        assert select_fields(document) == document
        select_fields(document, include=["a", "*.b"], exclude=["a.*"])
        assert canonical_json(document) == before

    @pytest.mark.parametrize("path", ["", ".", "a.", ".a", "a..b", 7])
    def test_a_wrong_path_is_a_policy_error(self, path: Any) -> None:
        with pytest.raises(PolicyError, match="not a path"):
            select_fields({}, include=[path])

    @pytest.mark.parametrize("option", ["include", "exclude"])
    def test_a_choice_of_nothing_or_of_letters_is_a_policy_error(self, option: Any) -> None:
        with pytest.raises(PolicyError, match="names no field"):
            select_fields({}, **{option: ()})
        with pytest.raises(PolicyError, match=r"write \('amount',\)"):
            select_fields({}, **{option: "amount"})

    def test_it_works_on_what_parse_json_reads(self) -> None:
        assert select_fields(parse_json(b'{"b":1,"a":[2]}'), include=["a"]) == {"a": [2]}


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


class Shade(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    LOW = 1


class Word(enum.StrEnum):
    ONE = "1"


class Rights(enum.Flag):
    READ = 1
    WRITE = 2


@dataclasses.dataclass
class Charge:
    id: Any
    trace: str = dataclasses.field(default="", compare=False)


@dataclasses.dataclass
class Refund:
    id: Any


class Model(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="allow")
    id: Any


class Struct(msgspec.Struct):
    id: Any


Point = namedtuple("Point", "x y")

DIFFERENT: list[Any] = [
    None,
    True,
    False,
    0,
    1,
    -1,
    1.0,
    1.5,
    float("inf"),
    "",
    "1",
    "n",
    "None",
    b"",
    b"1",
    [],
    [1],
    [[1]],
    [1, 1],
    ["1"],
    {},
    {1: 1},
    {"1": 1},
    {True: 1},
    {None: 1},
    {"a": None},
    set(),
    {1},
    {"1"},
    Decimal("1"),
    Decimal("10"),
    Decimal("-1"),
    Decimal("1.5"),
    Decimal("0"),
    Decimal("NaN"),
    date(2024, 1, 1),
    datetime(2024, 1, 1),
    datetime(2024, 1, 1, tzinfo=UTC),
    "2024-01-01",
    time(0),
    time(0, tzinfo=UTC),
    timedelta(1),
    timedelta(0, 1),
    UUID(int=1),
    UUID(int=1).hex,
    Colour.RED,
    Colour.BLUE,
    Shade.RED,
    Level.LOW,
    Word.ONE,
    Rights.READ,
    Rights.READ | Rights.WRITE,
    Charge(1),
    Charge("1"),
    Refund(1),
    Model(id=1),
    Model.model_validate({"id": 1, "more": 2}),
    Struct(1),
    {"id": 1},
    Point(1, 1),
    PurePosixPath("1"),
    PurePosixPath("a/b"),
]

SAME: list[tuple[Any, Any]] = [
    ([1, "a"], (1, "a")),
    ({1, 2, 3}, frozenset([3, 2, 1])),
    ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    ({"a": 1}, OrderedDict(a=1)),
    ({"a": 1}, defaultdict(int, a=1)),
    ({"a": 2}, Counter("aa")),
    (b"x", bytearray(b"x")),
    (0.0, -0.0),
    (float("nan"), float("nan")),
    (Decimal("10"), Decimal("10.00")),
    (Decimal("10"), Decimal("1E1")),
    (Decimal("0"), Decimal("-0.000")),
    (Decimal("0.5"), Decimal("000.50")),
    (datetime(2024, 1, 1, 12, tzinfo=UTC), datetime(2024, 1, 1, 14, tzinfo=timezone(timedelta(hours=2)))),
    (Charge(1, trace="a"), Charge(1, trace="b")),
    (Model.model_validate({"id": 1, "a": 1, "b": 2}), Model.model_validate({"b": 2, "a": 1, "id": 1})),
]


class TestEncodeValue:
    def test_different_values_have_different_texts(self) -> None:
        texts = [encode_value(value) for value in DIFFERENT]
        assert [DIFFERENT[i] for i, text in enumerate(texts) if texts.index(text) != i] == []

    def test_strung_together_they_still_differ(self) -> None:
        # A text that begins another could be read in two ways.
        texts = sorted(encode_value(value) for value in DIFFERENT)
        assert [(a, b) for a, b in itertools.pairwise(texts) if b.startswith(a)] == []

    @pytest.mark.parametrize(("one", "other"), SAME)
    def test_equal_values_have_equal_texts(self, one: Any, other: Any) -> None:
        assert encode_value(one) == encode_value(other)
        assert encode_value({"k": [one]}) == encode_value({"k": (other,)})

    @given(documents, documents)
    def test_texts_are_equal_exactly_where_typed_values_are(self, one: Any, other: Any) -> None:
        assert (encode_value(one) == encode_value(other)) == (typed(one) == typed(other))

    @given(st.lists(text, max_size=4), st.lists(text, max_size=4))
    def test_boundaries_inside_lists_count(self, one: list[str], other: list[str]) -> None:
        assert (encode_value(one) == encode_value(other)) == (one == other)

    def test_a_subclass_counts_as_what_it_holds(self) -> None:
        class Loud(str):
            __slots__ = ()

            def __str__(self) -> str:
                return "loud"

            def __format__(self, spec: str) -> str:
                return "loud"

        class Many(int):
            def __format__(self, spec: str) -> str:
                return "many"

        class Half(float):
            def __repr__(self) -> str:
                return "half"

        assert encode_value([Loud("a"), Many(7), Half(0.5)]) == encode_value(["a", 7, 0.5])

    def test_the_precision_of_the_decimal_context_does_not_matter(self) -> None:
        with localcontext() as context:
            context.prec = 2
            assert encode_value(Decimal("1.2345")) != encode_value(Decimal("1.2346"))

    def test_extremes_are_encoded(self) -> None:
        zone = timezone(timedelta(hours=14))
        extremes = [datetime.min.replace(tzinfo=zone), datetime.max.replace(tzinfo=timezone(-timedelta(hours=12)))]
        assert len({encode_value(value) for value in [*extremes, 10**10_000, 10**10_000 + 1, "\ud800"]}) == 5

    @pytest.mark.parametrize("live", [object(), print, lambda: 1, sys.stdout, Charge, iter([1]), memoryview(b"")])
    def test_a_live_object_is_told(self, live: Any) -> None:
        assert encode_value(live, strict=False) == LIVE
        for holder in (live, [live], {"a": live}, Charge(live), Model(id=live), Struct(live), Point(1, live)):
            with pytest.raises(LiveObject, match=type(live).__qualname__):
                encode_value(holder)
        assert encode_value([1, live], strict=False) != encode_value([2, live], strict=False)
        assert encode_value([LIVE], strict=False) != encode_value([live], strict=False)

    def test_a_mapped_row_is_live_because_reading_it_may_query_the_database(self) -> None:
        @dataclasses.dataclass
        class Row:
            _sa_class_manager = object()
            id: int

        assert encode_value(Row(1), strict=False) == LIVE

    def test_classes_of_attrs_count_by_their_fields(self) -> None:
        class Attribute:
            def __init__(self, name: str, eq: bool) -> None:
                self.name, self.eq = name, eq

        class Bundle:
            __attrs_attrs__ = (Attribute("id", True), Attribute("trace", False))

            def __init__(self, id: int, trace: str) -> None:
                self.id, self.trace = id, trace

        assert encode_value(Bundle(1, "a")) == encode_value(Bundle(1, "b"))
        assert encode_value(Bundle(1, "a")) != encode_value(Bundle(2, "a"))

    def test_the_hash_seed_does_not_matter(self) -> None:
        program = (
            "from semel.core.encoding.canonical import encode_value;"
            "print(encode_value({'set': {'a', 'b', 'c', 1, None}, 'dict': {'x': 1, 2: 'y'}}))"
        )
        found = {
            subprocess.run(
                [sys.executable, "-c", program],
                env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(filter(None, sys.path))},
                capture_output=True,
                check=True,
            ).stdout
            for seed in ("1", "2", "3")
        }
        assert len(found) == 1


def typed(value: Any) -> Any:
    """The value with its types spelt out, as the slow and obvious statement of what must differ."""
    if isinstance(value, dict):
        return ("dict", {name: typed(member) for name, member in value.items()})
    if isinstance(value, list):
        return ("list", [typed(element) for element in value])
    return (type(value).__name__, value)
