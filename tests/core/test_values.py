"""``@value``: what a dataclass with slots can do, with methods that are compiled when they are first used."""

from __future__ import annotations

import copy
import inspect
import pickle
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from types import FunctionType
from typing import Any, Generic, TypeVar

import pytest

from semel.core.values import value

R = TypeVar("R")


class Base(Generic[R]):
    """The base of some values."""

    __slots__ = ()


@value
class Point(Base[int]):
    """A point."""

    x: int
    y: int = 2
    names: Mapping[str, str] = field(default_factory=dict, compare=False)
    hidden: str = field(default="", kw_only=True, repr=False)


@value
class Space(Point):
    """A point with one more field."""

    z: int = 3


@dataclass(slots=True)
class Plain(Base[int]):
    """A point, as the standard library makes it."""

    x: int
    y: int = 2
    names: Mapping[str, str] = field(default_factory=dict, compare=False)
    hidden: str = field(default="", kw_only=True, repr=False)


def test_a_value_behaves_as_a_dataclass_with_slots() -> None:
    classes: tuple[Any, ...] = (Point, Plain)
    for cls in classes:
        made = cls(1, hidden="secret")
        assert repr(made) == f"{cls.__name__}(x=1, y=2, names={{}})"
        assert made == cls(x=1, names={"a": "b"}, hidden="secret")
        assert made != cls(1)
        assert made != (1, 2)
        assert made != Space(1, hidden="secret")
        with pytest.raises(TypeError, match="unhashable"):
            hash(made)
        with pytest.raises(TypeError, match=r"__init__\(\) missing 1 required positional argument: 'x'"):
            cls()
        with pytest.raises(AttributeError):
            made.other = 1
        assert not hasattr(made, "__dict__")
        assert made.names is not cls(1).names
        assert replace(made, y=5) == cls(1, 5, hidden="secret")
        assert asdict(made) == {"x": 1, "y": 2, "names": {}, "hidden": "secret"}
        assert [each.name for each in fields(cls)] == ["x", "y", "names", "hidden"]
        for other in (copy.copy(made), copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
            assert type(other) is cls
            assert other == made
        match made:
            case Plain(x, y, _) | Point(x, y, _):
                assert (x, y) == (1, 2)


def test_a_value_is_described_as_a_dataclass_is() -> None:
    assert is_dataclass(Point)
    assert inspect.signature(Point) == inspect.signature(Plain)
    assert Point.__init__.__qualname__ == "Point.__init__"
    assert Point.__doc__ == "A point."
    matched: Any = Point
    assert matched.__match_args__ == ("x", "y", "names")


def test_a_value_may_extend_another() -> None:
    assert repr(Space(1, z=4)) == "Space(x=1, y=2, names={}, z=4)"
    assert Space(1) == Space(1, 2, {}, 3) != Space(1, z=4)
    assert inspect.signature(Space).parameters.keys() == {"x", "y", "names", "z", "hidden"}


def test_methods_of_the_class_itself_stay() -> None:
    @value
    class Temperature:
        """With methods of its own."""

        degrees: float

        def __post_init__(self) -> None:
            if self.degrees < 0:
                raise ValueError("too cold")

        def __repr__(self) -> str:
            return f"{self.degrees} K"

        def __eq__(self, other: object) -> bool:
            return True

        def __hash__(self) -> int:
            return 7

    assert repr(Temperature(3.0)) == "3.0 K"
    assert Temperature(3.0) == 4
    assert hash(Temperature(3.0)) == 7
    with pytest.raises(ValueError, match="too cold"):
        Temperature(-1.0)


def test_a_method_is_compiled_once_when_it_is_first_used() -> None:
    @value
    class Fresh:
        """Nobody has used it."""

        x: int

    def compiled() -> set[str]:
        return {name for name in ("__init__", "__repr__", "__eq__") if isinstance(vars(Fresh)[name], FunctionType)}

    assert compiled() == set()
    made = Fresh(1)
    assert compiled() == {"__init__"}
    first = vars(Fresh)["__init__"]
    assert made == Fresh(1)
    assert vars(Fresh)["__init__"] is first
    assert compiled() == {"__init__", "__eq__"}


def test_threads_may_use_a_value_for_the_first_time_together() -> None:
    for _ in range(20):

        @value
        class Fresh:
            """Nobody has used it."""

            x: int

        start = threading.Barrier(4)
        wrong: list[object] = []

        def use(fresh: Any = Fresh, start: threading.Barrier = start, wrong: list[object] = wrong) -> None:
            start.wait(10)
            made = fresh(1)
            if made != fresh(1) or not repr(made).endswith("Fresh(x=1)"):
                wrong.append(made)

        threads = [threading.Thread(target=use) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
