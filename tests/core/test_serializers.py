"""Results come back exactly as they were, with their types; or they are refused, and the refusal says what to do."""

from __future__ import annotations

import dataclasses
import math
import sys
import typing
import uuid
from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal
from enum import Enum, Flag, IntEnum, StrEnum, auto
from functools import cached_property
from inspect import Signature
from typing import (
    Annotated,
    Any,
    Generic,
    Literal,
    NamedTuple,
    NewType,
    NotRequired,
    Optional,
    TypedDict,
    TypeVar,
    Union,
)
from zoneinfo import ZoneInfo

import msgspec
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from semel.core.encoding.plain import MAX_DEPTH, PLAIN, PlainSerializer
from semel.core.encoding.serializers import Serializer, cached_serializer, decode_result, serializer_for
from semel.core.encoding.snapshot import NotSerializable
from semel.core.encoding.typed import TypedSerializer
from semel.errors import PolicyError, SnapshotUnreadable


def same(left: Any, right: Any) -> bool:
    """Equal in value and in type, all the way down: 1, True and 1.0 differ, a NaN is a NaN, 0.0 is not -0.0."""
    if type(left) is not type(right):
        return False
    if isinstance(left, float):
        return (math.isnan(left) and math.isnan(right)) or (
            left == right and math.copysign(1, left) == math.copysign(1, right)
        )
    if isinstance(left, complex):
        return same(left.real, right.real) and same(left.imag, right.imag)
    if isinstance(left, Decimal):
        return repr(left) == repr(right)
    if isinstance(left, (datetime, time)):
        return (left.replace(tzinfo=None), left.fold) == (right.replace(tzinfo=None), right.fold) and same_zone(
            left, right
        )
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict):
        return same(list(left.items()), list(right.items()))  # in the same order
    if isinstance(left, (set, frozenset)):
        return len(left) == len(right) and all(any(same(one, other) for other in right) for one in left)
    if dataclasses.is_dataclass(left):
        return same(
            [getattr(left, f.name) for f in dataclasses.fields(left)],
            [getattr(right, f.name) for f in dataclasses.fields(right)],
        )
    return bool(left == right)


def same_zone(left: datetime | time, right: datetime | time) -> bool:
    return type(left.tzinfo) is type(right.tzinfo) and str(left.tzinfo) == str(right.tzinfo)


def back(value: Any, annotation: Any = Signature.empty) -> Any:
    serializer = serializer_for(annotation)
    return decode_result(serializer, serializer.name, serializer.encode(value))


def assert_back(value: Any, annotation: Any = Signature.empty) -> None:
    again = back(value, annotation)
    assert same(again, value), f"{value!r} came back as {again!r}"


# ---------------------------------------------------------------------------------------------------- plain data


def steady(value: Any) -> str:
    """A repr that is the same in every process, for test ids: a set's own order changes with the hash seed."""
    return f"{{{', '.join(sorted(map(repr, value)))}}}" if isinstance(value, set | frozenset) else repr(value)


@pytest.mark.parametrize("annotation", [Signature.empty, Any, object, None, bool, dict[str, int], int | None])
@pytest.mark.parametrize(
    "value",
    [None, {}, [], (), set(), frozenset(), 0, 0.0, -0.0, False, "", b"", bytearray(), 0j, Decimal(0), timedelta(0)],
    ids=repr,
)
def test_falsy_results_come_back_as_they_were(value: Any, annotation: Any) -> None:
    assert_back(value, annotation)


HEADS = {"$tuple": [1]}


@pytest.mark.parametrize(
    "value",
    [
        True,
        1,
        1.0,
        -1,
        10**599,
        10**600,
        -(10**600),
        pytest.param(1 << 100_000, id="an int of 30 000 digits"),
        math.nan,
        math.inf,
        -math.inf,
        5e-324,
        complex(-0.0, math.inf),
        "é \x00 \U0001f600",
        "\ud83d\ude00",  # two lone surrogates, not the one character that they spell
        b"\x00\xff",
        bytearray(b"ab"),
        [1, [True, [1.0]]],
        (1, (2,), [3]),
        {1, 2.5, "x", None},
        frozenset({(1, 2), b"x"}),
        {"a": {"b": [None, {}]}},
        {1: "int", "1": "str", None: 0, (1, 2): [], 1.5: {}, b"k": ()},
        HEADS,
        {"$dict": HEADS, "$": 1},
        {"plain": HEADS, "t": (HEADS,)},
        {"$object": ["builtins.eval", "1"]},
        {"$nobody": 1, "x": {1}},
        "+[1]",
        [1, "+"],
        datetime(2026, 1, 2, 3, 4, 5, 6),
        datetime(1, 1, 1, tzinfo=UTC),
        datetime(2026, 10, 25, 2, 30, fold=1, tzinfo=ZoneInfo("Europe/Berlin")),
        datetime(2026, 1, 1, tzinfo=timezone(timedelta(hours=-3, minutes=-30))),
        datetime(2026, 1, 1, tzinfo=timezone(timedelta(seconds=3601, microseconds=7), "odd")),
        time(1, 2, 3, 4, tzinfo=UTC),
        time(23, 59, fold=1),
        date(9999, 12, 31),
        timedelta(days=-5, seconds=3, microseconds=9),
        timedelta.max,
        Decimal("1.10"),
        Decimal("-0E+5"),
        Decimal("sNaN12"),
        uuid.UUID(int=7),
    ],
    ids=lambda value: steady(value)[:40],
)
def test_plain_data_comes_back_exactly(value: Any) -> None:
    assert_back(value)
    assert_back([value])
    assert_back({"k": (value,)})


def zones() -> st.SearchStrategy[tzinfo | None]:
    fixed = st.timedeltas(timedelta(hours=-23), timedelta(hours=23)).map(timezone)
    return st.one_of(
        st.none(), st.just(UTC), fixed, st.sampled_from([ZoneInfo("Europe/Paris"), ZoneInfo("Asia/Tokyo")])
    )


def quiet(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Without signalling NaNs, which cannot be hashed."""

    def hashable(value: Any) -> bool:
        try:
            hash(value)
        except TypeError:
            return False
        return True

    return inner.filter(hashable)


hashables = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        st.complex_numbers(),
        st.text(st.characters(exclude_categories=()), max_size=8),
        st.sampled_from(["$tuple", "$dict", "$", "+", "$object"]),
        st.binary(max_size=8),
        st.decimals(),
        st.uuids(),
        st.datetimes(timezones=zones(), allow_imaginary=True),
        st.times(timezones=st.just(UTC)),
        st.dates(),
        st.timedeltas(),
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3).map(tuple), st.frozensets(quiet(inner), max_size=3)),
    max_leaves=8,
)


plain_data = st.recursive(
    hashables,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(st.text(max_size=4), inner, max_size=4),
        st.dictionaries(quiet(hashables), inner, max_size=3),
        st.sets(quiet(hashables), max_size=3),
    ),
    max_leaves=20,
)


@given(plain_data)
def test_any_plain_data_comes_back_exactly_including_types(value: Any) -> None:
    assert_back(value)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
        lambda i: st.lists(i) | st.dictionaries(st.text(), i),
    )
)
def test_what_json_can_hold_is_written_as_json(value: Any) -> None:
    import json

    payload = PLAIN.encode(value)
    assert payload[:1] != b"+"
    assert same(json.loads(payload), value)


class Colour(Enum):
    RED = "red"
    BLUE = ["unhashable", "value"]  # noqa: RUF012
    CRIMSON = "red"  # noqa: PIE796


class Level(IntEnum):
    LOW = 0
    HIGH = 1


class Word(StrEnum):
    A = "a"


class Rights(Flag):
    READ = auto()
    WRITE = auto()


class Text(str):
    __slots__ = ()


class Zone(tzinfo):
    def utcoffset(self, dt: datetime | None) -> timedelta:
        return timedelta(0)

    dst = utcoffset

    def tzname(self, dt: datetime | None) -> str:
        return "Z"


Pair = namedtuple("Pair", "a b")


@pytest.mark.parametrize(
    "value",
    [
        Level.HIGH,
        Word.A,
        Colour.RED,
        Text("x"),
        Pair(1, 2),
        defaultdict(list),
        OrderedDict(),
        object(),
        object,
        print,
        iter([1]),
        range(3),
        ValueError("x"),
        memoryview(b"x"),
        datetime(2026, 1, 1, tzinfo=Zone()),
        {Level.LOW: 1},
        {"k": [Level.LOW]},
        {Text("k"): 1},
        ...,
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_would_come_back_as_something_else_is_refused(value: Any) -> None:
    with pytest.raises(NotSerializable):
        PLAIN.encode(value)
    with pytest.raises(NotSerializable):
        PLAIN.encode({"in": [value]})


def test_the_refusal_says_what_to_do() -> None:
    with pytest.raises(NotSerializable, match=r"Level would not come back .*return type .*serializer="):
        PLAIN.encode(Level.HIGH)


def nested(levels: int, leaf: Any, wrap: Any = lambda inner: [inner]) -> Any:
    for _ in range(levels):
        leaf = wrap(leaf)
    return leaf


@pytest.mark.slow
@pytest.mark.parametrize("wrap", [lambda x: [x], lambda x: {"k": x}, lambda x: (x,), lambda x: {1: x}])
def test_depth_is_bounded(wrap: Any) -> None:
    value = nested(MAX_DEPTH, 1, wrap)
    assert same(back(value), value)
    for levels in (MAX_DEPTH + 2, 5_000, 100_000):
        with pytest.raises(NotSerializable, match="levels deep"):
            PLAIN.encode(nested(levels, 1, wrap))


def test_a_structure_that_contains_itself_is_refused() -> None:
    ring: list[Any] = []
    ring.append({"me": ring})
    with pytest.raises(NotSerializable, match="contains itself"):
        PLAIN.encode(ring)
    with pytest.raises(NotSerializable, match="contains itself"):
        serializer_for(list[Colour]).encode(ring)


def test_little_stack_left_is_a_refusal_not_a_recursion_error() -> None:
    value = nested(MAX_DEPTH, (1,))

    def deep(frames: int) -> bytes:
        return deep(frames - 1) if frames else PLAIN.encode(value)

    used = len(__import__("inspect").stack())
    with pytest.raises(NotSerializable, match="stack"):
        deep(sys.getrecursionlimit() - used - 40)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"+",
        b"{",
        b"[1] tail",
        b"NaN",
        b"+NaN",
        b"\xff",
        b'+{"$tuple": 1}',
        b'+{"$set": [[]]}',
        b'+{"$dict": [[1]]}',
        b'+{"$dict": [[[], 1]]}',
        b'+{"$int": "zz"}',
        b'+{"$float": []}',
        b'+{"$bytes": "*"}',
        b'+{"$uuid": "x"}',
        b'+{"$decimal": "x"}',
        b'+{"$decimal": {}}',
        b'+{"$complex": []}',
        b'+{"$date": 1}',
        b'+{"$datetime": ["2026-01-01", 7, null]}',
        b'+{"$datetime": ["2026-01-01", 0, {"key": "../../etc/passwd"}]}',
        b'+{"$datetime": ["2026-01-01", 0, {"key": "No/Where"}]}',
        b'+{"$time": ["01:00", 0, [[9, 0, 0], null]]}',
        b'+{"$timedelta": [999999999999, 0, 0]}',
        b"[" * 200_000,
        b"+" + b"[" * 5_000 + b"]" * 5_000,
        b'+{"$object": ["Payment", [{}, {}]]}',
        b'+{"$enum": ["os.system", "x"]}',
        b'+{"$union": [0, 1]}',
        b'+{"$unheard": 1}',
    ],
    ids=lambda payload: repr(payload[:40]),
)
@pytest.mark.parametrize("annotation", [Any, list[Colour], dict[Colour, int]])
def test_a_payload_that_nobody_wrote_is_unreadable(payload: bytes, annotation: Any) -> None:
    with pytest.raises(SnapshotUnreadable):
        serializer_for(annotation).decode(payload)


@given(st.binary(max_size=40) | st.text('+[]{}":$,0123tupledic', max_size=40).map(str.encode))
def test_random_payloads_are_decoded_or_unreadable_and_nothing_else(payload: bytes) -> None:
    for serializer in (PLAIN, serializer_for(Payment | Colour | list[Payment])):
        try:
            value = serializer.decode(payload)
        except SnapshotUnreadable:
            continue
        assert same(serializer.decode(serializer.encode(value)), value)


# ------------------------------------------------------------------------------------------- annotated classes


@dataclass
class Money:
    amount: Decimal
    currency: str = "EUR"


@dataclass(frozen=True, slots=True)
class Line:
    sku: str
    price: Money
    tags: frozenset[str] = frozenset()


@dataclass
class Payment:
    id: str
    lines: list[Line]
    colour: Colour = Colour.RED
    parent: Payment | None = None
    meta: dict[str, Any] = field(default_factory=dict)
    total: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        self.total += 1  # would be 2 if it ran again on replay

    @cached_property
    def label(self) -> object:
        return object()


class Point(NamedTuple):
    x: int
    colour: Colour = Colour.RED


class Receipt(TypedDict):
    id: str
    payment: NotRequired[Payment]


class PlainReceipt(TypedDict):
    id: str
    lines: NotRequired[list[str]]


class Thread(TypedDict):
    id: str
    inner: NotRequired[Thread]


class Tree(TypedDict):
    kids: list[Tree]
    colour: Colour


T = TypeVar("T")


@dataclass
class Page(Generic[T]):
    items: list[T]
    next: Page[T] | None = None


OrderId = NewType("OrderId", str)
PaymentId = NewType("PaymentId", Payment)


def payment(**fields: Any) -> Payment:
    return Payment("p", [Line("s", Money(Decimal("1.10")), frozenset({"a"}))], **fields)


@pytest.mark.parametrize(
    ("annotation", "value"),
    [
        (Money, Money(Decimal("1.0"), "USD")),
        (Payment, payment()),
        (Payment, payment(parent=payment(colour=Colour.BLUE), meta={"t": (1, b"x"), "$x": {1: 2}})),
        (Money, Money(100, None)),  # type: ignore[arg-type]  # fields hold what they hold
        (Payment, {"id": "a dict, whatever the annotation says"}),
        (Payment, None),
        (list[Payment], [payment(), payment()]),
        (list[Payment], (1, 2)),
        (list[Payment], [1, payment(), None]),
        (Sequence[Payment], [payment()]),
        (Sequence[Payment], (payment(),)),
        (tuple[Payment, ...], (payment(), payment())),
        (tuple[int, Colour, Money], (1, Colour.BLUE, Money(Decimal(1)))),
        (tuple[int, Colour], (1, 2, 3)),
        (tuple[()], ()),
        (dict[str, Payment], {"a": payment(), "$b": payment()}),
        (Mapping[str, Payment], {"a": payment()}),
        (dict[Colour, Level], {Colour.RED: Level.LOW, Colour.BLUE: Level.HIGH}),
        (dict[Point, set[Level]], {Point(1): {Level.HIGH}, Point(2, Colour.BLUE): set()}),
        (set[Point], {Point(1), Point(2)}),
        (frozenset[Word], frozenset({Word.A})),
        (Colour, Colour.BLUE),
        (Colour, Colour.CRIMSON),
        (Level, Level.LOW),
        (Level, 0),
        (Level, False),
        (Rights, Rights.READ | Rights.WRITE),
        (Rights, Rights(0)),
        (Point, Point(1)),
        (Pair, Pair(1, (2,))),
        (Payment | None, payment()),
        (Optional[Payment], None),  # noqa: UP045
        (Union[Money, Payment, str], payment()),  # noqa: UP007
        (Money | Payment | str, "text"),
        (list[Money] | list[Payment], [payment()]),
        (list[Money] | list[Payment], []),
        (dict[str, Money] | Money | list[Colour | Point], [Colour.RED, Point(3)]),
        (Receipt, {"id": "r", "payment": payment()}),
        (Receipt, {"id": "r"}),
        (Receipt, {"id": "r", "more": (1,)}),
        (Receipt, {"$id": 1}),
        (Thread, {"id": "r", "inner": {"id": "s", "inner": {"id": "t"}}}),
        (Tree, {"kids": [{"kids": [], "colour": Colour.RED}], "colour": Colour.BLUE}),
        (Literal[Colour.RED, "x"], Colour.RED),
        (Literal[Colour.RED, "x"], "x"),
        (Annotated[Payment, "note"], payment()),
        (OrderId, "o"),
        (PaymentId, payment()),
        (Page[Money], Page([Money(Decimal(1))], Page([]))),
        (Page[Page[Colour]], Page([Page([Colour.RED])])),
        (Page, Page([1, (2,)])),
    ],
    ids=lambda value: steady(value)[:50],
)
def test_annotated_values_are_rebuilt(annotation: Any, value: Any) -> None:
    assert_back(value, annotation)


def test_two_classes_of_the_same_shape_in_a_union_stay_apart() -> None:
    @dataclass
    class Captured:
        id: str

    @dataclass
    class Refused:
        id: str

    for value in (Captured("1"), Refused("1")):
        assert type(back(value, Captured | Refused)) is type(value)
        assert type(back({"k": [value]}, dict[str, list[Captured | Refused | None]])["k"][0]) is type(value)


def test_init_and_post_init_do_not_run_again() -> None:
    value = payment()
    value.total = 5.0
    assert back(value, Payment).total == 5.0


def test_attributes_beside_the_fields_are_kept_and_cached_ones_computed_again() -> None:
    value = payment()
    value.note = ("kept",)  # type: ignore[attr-defined]
    first = value.label
    again = back(value, Payment)
    assert again.note == ("kept",)
    assert again.label is not first
    value.note = object()  # type: ignore[attr-defined]
    with pytest.raises(NotSerializable):
        serializer_for(Payment).encode(value)


def test_frozen_slots_and_hash_survive() -> None:
    line = Line("s", Money(Decimal(1)))
    again = back(line, Line)
    assert again == line
    with pytest.raises(dataclasses.FrozenInstanceError):
        again.sku = "other"


@dataclass
class Base:
    a: int


@dataclass
class Derived(Base):
    b: int


class Failing(Exception):
    pass


@dataclass
class Odd(dict):  # type: ignore[type-arg]
    a: int = 0


@pytest.mark.parametrize(
    ("annotation", "value"),
    [
        (Base, Derived(1, 2)),
        (list[Base], [Base(1), Derived(1, 2)]),
        (Payment, Money(Decimal(1))),
        (Money | Base, payment()),
        (Money, Money(object())),  # type: ignore[arg-type]
        (Colour, Level.LOW),
        (Odd, Odd(1)),
        (int, Level.LOW),
        (str, Word.A),
        (dict[str, int], defaultdict(int)),
        (tuple[int, int], Pair(1, 2)),
        pytest.param(Base, object.__new__(Base), id="a field is missing"),
    ],
    ids=lambda value: getattr(value, "__name__", type(value).__name__),
)
def test_a_value_that_neither_fits_nor_is_plain_is_refused(annotation: Any, value: Any) -> None:
    with pytest.raises(NotSerializable):
        serializer_for(annotation).encode(value)


def test_the_arms_of_a_union_keep_their_order_in_the_cache() -> None:
    """``Money | Base == Base | Money``, but a result is stored with the index of its arm."""
    value = Base(1)
    for annotation in (Money | Base, Base | Money):
        assert cached_serializer(annotation).encode(value) == serializer_for(annotation).encode(value)


def test_a_subclass_of_a_union_with_both_is_rebuilt() -> None:
    assert_back(Derived(1, 2), Base | Derived)
    assert_back([Base(1), Derived(1, 2)], list[Base | Derived])


@pytest.mark.parametrize(
    "annotation",
    [
        Any,
        None,
        int,
        dict[str, Any],
        str | None,
        list[tuple[int, ...]],
        PlainReceipt,
        OrderId,
        "Unresolved",
        T,
        Literal[1],
    ],
    ids=repr,
)
def test_annotations_without_classes_take_the_quick_plain_path(annotation: Any) -> None:
    assert serializer_for(annotation) is PLAIN


def test_a_class_defined_after_the_function_is_found_when_first_used() -> None:
    def lines() -> type:
        @dataclass
        class Early:
            late: Late  # type: ignore[name-defined]  # noqa: F821

        return Early

    early = lines()
    early.__module__ = __name__
    serializer = serializer_for(early)
    globals()["Late"] = Money
    try:
        value = early(Money(Decimal(2)))
        assert same(serializer.decode(serializer.encode(value)), value)
    finally:
        del globals()["Late"]


def test_what_would_be_lost_of_a_named_tuple_or_a_model_is_refused() -> None:
    class Tagged(NamedTuple("Tagged", [("a", int)])):
        """Has a __dict__, as it has no __slots__."""

    value = Tagged(1)
    assert same(back(value, Tagged), value)
    value.note = "beside the fields"  # type: ignore[attr-defined]
    with pytest.raises(NotSerializable, match="would lose them"):
        serializer_for(Tagged).encode(value)


def test_a_typed_dict_that_names_a_later_class() -> None:
    shape: Any = TypedDict("shape", {"late": "LateColour"})  # type: ignore[name-defined]  # noqa: F821
    shape.__module__ = __name__
    serializer = serializer_for(shape)
    globals()["LateColour"] = Colour
    try:
        assert serializer.decode(serializer.encode({"late": Colour.RED})) == {"late": Colour.RED}
    finally:
        del globals()["LateColour"]


def test_a_field_added_to_a_named_tuple_takes_its_default() -> None:
    one = namedtuple("one", "a")
    two = namedtuple("two", "a b", defaults=[5])
    three = namedtuple("three", "a b")
    for cls in (one, two, three):
        cls.__qualname__ = "V"
    payload = serializer_for(one).encode(one(1))
    assert serializer_for(two).decode(payload) == two(1, 5)
    with pytest.raises(SnapshotUnreadable, match="older than its field 'b'"):
        serializer_for(three).decode(payload)


def test_names_only_a_function_knows_leave_the_field_to_plain_data() -> None:
    class Hidden(Enum):
        A = 1

    @dataclass
    class Local:
        me: Local | None
        hidden: Hidden
        colour: Colour

    assert_back(Local(None, 1, "x"), Local)  # type: ignore[arg-type]
    with pytest.raises(NotSerializable):
        serializer_for(Local).encode(Local(None, Hidden.A, Colour.RED))


@pytest.mark.skipif(sys.version_info < (3, 12), reason="type statements came with Python 3.12")
def test_type_aliases_that_name_themselves() -> None:
    scope: dict[str, Any] = {"Colour": Colour}
    exec("type Nest = list[Nest] | Colour\ntype Of[A] = list[A]", scope)
    assert_back([[Colour.RED], [], Colour.BLUE], scope["Nest"])
    assert_back([Colour.RED], scope["Of"][Colour])


# ------------------------------------------------------------------------- classes and annotations that change


def renamed(cls: type, name: str) -> type:
    cls.__qualname__ = name
    return cls


def versions() -> tuple[Any, Any, Any, Any]:
    @dataclass
    class One:
        a: int
        b: int = 0

    @dataclass
    class Added:
        a: int
        b: int = 0
        c: list[int] = field(default_factory=lambda: [7])

    @dataclass
    class Removed:
        a: int

    @dataclass
    class Required:
        a: int
        b: int
        c: int

    return tuple(renamed(cls, "V") for cls in (One, Added, Removed, Required))  # type: ignore[return-value]


def test_a_field_added_later_takes_its_default() -> None:
    one, added, _, _ = versions()
    again = serializer_for(added).decode(serializer_for(one).encode(one(1, 2)))
    assert again == added(1, 2, [7])


def test_a_field_removed_or_required_later_is_refused_not_guessed() -> None:
    one, _, removed, required = versions()
    payload = serializer_for(one).encode(one(1, 2))
    with pytest.raises(SnapshotUnreadable, match="no longer has: \\['b'\\]"):
        serializer_for(removed).decode(payload)
    with pytest.raises(SnapshotUnreadable, match="older than its field 'c'"):
        serializer_for(required).decode(payload)


def test_another_class_of_the_same_shape_is_refused() -> None:
    payload = serializer_for(Base).encode(Base(1))

    @dataclass
    class Other:
        a: int

    with pytest.raises(SnapshotUnreadable, match="holds a 'Base' where the annotation now says"):
        serializer_for(Other).decode(payload)
    with pytest.raises(SnapshotUnreadable):
        serializer_for(Other | Base).decode(serializer_for(Base | Other).encode(Base(1)))
    with pytest.raises(SnapshotUnreadable, match="another union"):
        serializer_for(Base | None).decode(serializer_for(Other | Base).encode(Base(1)))


def test_an_annotation_may_be_added_and_plain_results_still_read() -> None:
    for value in ({"id": "p"}, None, (1, {2: 3})):
        assert same(decode_result(serializer_for(Payment), "json", PLAIN.encode(value)), value)


def test_an_annotation_that_is_gone_is_named_in_the_error() -> None:
    payload = serializer_for(Payment).encode(payment())
    with pytest.raises(SnapshotUnreadable, match="return annotation does not name"):
        decode_result(PLAIN, "typed", payload)


def test_no_type_is_looked_up_by_a_name_from_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    imported: list[str] = []
    real = __import__

    def watch(name: str, *args: Any, **kwargs: Any) -> Any:
        imported.append(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr("builtins.__import__", watch)
    planted = [
        b'+{"$object": ["antigravity.Planted", [{}, {}]]}',
        b'+{"$enum": ["antigravity.Planted", "X"]}',
        b'+{"$antigravity.Planted": []}',
        b'+{"$object": ["this", "{}"]}',
    ]
    for payload in planted:
        for annotation in (Any, Payment, Colour, Point, Payment | Colour):
            with pytest.raises(SnapshotUnreadable):
                serializer_for(annotation).decode(payload)
    assert not {"antigravity", "this"} & set(imported)
    assert not {"antigravity", "this"} & set(sys.modules)


# --------------------------------------------------------------------------------------- pydantic and msgspec


def test_pydantic_models_come_back_whole() -> None:
    class Inner(pydantic.BaseModel):
        when: datetime
        colour: Colour

    class Model(pydantic.BaseModel):
        model_config = pydantic.ConfigDict(extra="allow", strict=True)
        id: str = pydantic.Field(alias="ID")
        odd: int = pydantic.Field(validation_alias="odd_in", serialization_alias="oddOut")
        hidden: str = pydantic.Field("h", exclude=True)
        inner: Inner | None = None
        rate: float = math.nan
        count: int = 0
        anything: Any = None
        _private: int = pydantic.PrivateAttr(1)

        @pydantic.computed_field  # type: ignore[prop-decorator]
        @property
        def double(self) -> int:
            return self.count * 2

        @pydantic.field_validator("count")
        @classmethod
        def grow(cls, value: int) -> int:
            return value + 1  # would be 1 more if it ran again on replay

    when = datetime(2026, 1, 1, tzinfo=ZoneInfo("Europe/Berlin"))
    inner = Inner(when=when, colour=Colour.BLUE)
    value = Model.model_validate(
        {"ID": "1", "odd_in": 3, "hidden": "x", "inner": inner, "rate": 1.5, "count": 4, "more": (1,)}
    )
    value.anything = {1: (2,)}
    value._private = 9
    again = back(value, Model)
    assert type(again) is Model
    assert again == value
    assert (again.hidden, again._private, again.count, again.double) == ("x", 9, 5, 10)
    assert again.model_fields_set == value.model_fields_set
    assert again.model_extra == {"more": (1,)}
    assert same(again.anything, {1: (2,)})
    assert again.inner is not None
    assert again.inner.when.tzinfo is when.tzinfo
    assert again.model_dump_json() == value.model_dump_json()

    unset = Model.model_validate({"ID": "1", "odd_in": 3})
    assert back(unset, Model).model_dump(exclude_unset=True) == unset.model_dump(exclude_unset=True)
    assert math.isnan(back(unset, Model).rate)

    @dataclass
    class Holder:
        models: dict[str, list[Any]]
        model: Model

    globals()["Model"] = Model
    try:
        assert back(Holder({}, value), Holder).model == value
    finally:
        del globals()["Model"]
    assert back([value, None], list[Model | None]) == [value, None]
    assert back({"a": 1}, Model) == {"a": 1}


def test_pydantic_field_types_of_its_own_use_its_json_and_only_if_it_reads_back() -> None:
    from ipaddress import IPv4Address
    from pathlib import Path

    class Site(pydantic.BaseModel):
        url: pydantic.HttpUrl
        address: IPv4Address = pydantic.Field(alias="addr")
        path: Path = Path("/tmp")

    class Login(pydantic.BaseModel):
        secret: pydantic.SecretStr

    value = Site.model_validate({"url": "https://example.com/a?b=c", "addr": "10.0.0.1"})
    again = back(value, Site)
    assert type(again) is Site
    assert again == value
    assert type(again.url) is type(value.url)
    with pytest.raises(NotSerializable):  # its JSON is asterisks
        serializer_for(Login).encode(Login(secret=pydantic.SecretStr("s3")))


def test_pydantic_subclasses_generics_roots_and_dataclasses() -> None:
    class Parent(pydantic.BaseModel):
        a: int

    class Child(Parent):
        b: int

    class Box(pydantic.BaseModel, Generic[T]):
        item: T

    class Names(pydantic.RootModel[list[str]]):
        pass

    @pydantic.dataclasses.dataclass
    class Checked:
        a: int
        p: Any = None

    with pytest.raises(NotSerializable):
        serializer_for(Parent).encode(Child(a=1, b=2))
    assert type(back(Child(a=1, b=2), Parent | Child)) is Child
    boxed = Box[Parent](item=Parent(a=1))
    assert back(boxed, Box[Parent]) == boxed
    assert type(back(boxed, Box[Parent])) is Box[Parent]
    assert back(Names(["a"]), Names) == Names(["a"])
    assert_back(Checked(a=3, p=(1,)), Checked)


def test_pydantic_models_that_change() -> None:
    first = pydantic.create_model("M", a=(int, ...))
    later = pydantic.create_model("M", a=(int, ...), b=(list[int], pydantic.Field(default_factory=lambda: [1])))
    required = pydantic.create_model("M", a=(int, ...), b=(int, ...))
    payload = serializer_for(first).encode(first(a=1))
    assert serializer_for(later).decode(payload) == later(a=1)
    with pytest.raises(SnapshotUnreadable, match="older than its field 'b'"):
        serializer_for(required).decode(payload)
    with pytest.raises(SnapshotUnreadable, match="no longer has"):
        serializer_for(first).decode(serializer_for(later).encode(later(a=1)))


def test_msgspec_structs_come_back() -> None:
    class Inner(msgspec.Struct, frozen=True, tag=True):
        data: bytes

    class Other(msgspec.Struct, frozen=True, tag=True):
        data: bytes

    class Row(msgspec.Struct, rename="camel", omit_defaults=True, eq=False):
        row_id: int
        when: datetime
        inner: Inner | Other | None = None
        names: tuple[str, ...] = ()
        anything: Any = None

    local = {"Inner": Inner, "Other": Other}
    globals().update(local)
    try:
        value = Row(1, datetime(2026, 1, 1, tzinfo=UTC), Other(b"\xff"), ("a",))
        again = back(value, Row)
        assert type(again) is Row
        assert msgspec.structs.astuple(again) == msgspec.structs.astuple(value)
        assert type(again.inner) is Other
        assert type(back([value], list[Row | None])[0]) is Row
        assert back({"a": 1}, Row) == {"a": 1}
        for lossy in ((1,), {1: 2}, Colour.RED, object(), math.nan):
            value.anything = lossy
            with pytest.raises(NotSerializable):
                serializer_for(Row).encode(value)
        with pytest.raises(SnapshotUnreadable):
            serializer_for(Row).decode(b'+{"$object": ["%s", "{}"]}' % Row.__qualname__.encode())
    finally:
        for name in local:
            del globals()[name]


def test_pydantic_and_msgspec_are_not_imported_for_plain_results() -> None:
    import subprocess

    code = (
        "import sys; from semel.core.encoding.serializers import PlainSerializer, serializer_for;"
        "serializer_for(dict).encode({}); serializer_for(list[PlainSerializer]);"
        "sys.exit(bool({'pydantic', 'msgspec', 'cryptography', 'zstandard'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# -------------------------------------------------------------------------------------------- the user's own


class Reversed:
    name = "reversed"

    def encode(self, value: Any) -> bytes:
        return str(value)[::-1].encode()

    def decode(self, payload: bytes) -> Any:
        return int(payload.decode()[::-1])


def test_a_serializer_of_the_users_own() -> None:
    own = serializer_for(int, Reversed())
    assert isinstance(own, Serializer)
    assert decode_result(own, "reversed", own.encode(123)) == 123
    with pytest.raises(SnapshotUnreadable, match="'reversed' cannot decode"):
        decode_result(own, "reversed", b"x")
    assert same(decode_result(own, "json", PLAIN.encode((1,))), (1,))  # stored before it was given
    with pytest.raises(SnapshotUnreadable, match="written by the serializer 'reversed'"):
        decode_result(PLAIN, "reversed", b"321")


@pytest.mark.parametrize("name", ["", "é", "x" * 33, 7, "json", "typed"])
def test_a_bad_serializer_name_is_refused_when_the_function_is_decorated(name: Any) -> None:
    own = Reversed()
    own.name = name
    with pytest.raises(PolicyError):
        serializer_for(int, own)


def test_what_is_no_serializer_is_refused() -> None:
    with pytest.raises(PolicyError, match="name, encode and decode"):
        serializer_for(int, object())  # type: ignore[arg-type]
    assert serializer_for(Payment, PLAIN) is PLAIN
    assert isinstance(serializer_for(Payment), TypedSerializer)
    assert isinstance(serializer_for(typing.get_type_hints(payment)["return"]), TypedSerializer)
    assert isinstance(serializer_for(), PlainSerializer)
