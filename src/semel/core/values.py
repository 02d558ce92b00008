"""The decorator for small immutable values.

``@value`` makes a dataclass with slots that is frozen for type checkers. It is not frozen at run time, because a frozen
dataclass sets each field through ``object.__setattr__``, which makes its creation three times as slow.

There are more than a hundred values, and a process uses few of them. ``dataclass`` compiles the methods of each class
at once, which costs every process 13 to 25 ms at its start. So they are compiled when they are first used.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final, TypeVar, dataclass_transform

T = TypeVar("T")

_METHODS: Final = {"__init__": "init", "__repr__": "repr", "__eq__": "eq"}
"""The methods that ``dataclass`` compiles, with the parameters that ask for them."""
_NONE: Final = dict.fromkeys(_METHODS.values(), False)


@dataclass_transform(frozen_default=True, eq_default=True, field_specifiers=(field,))
def value(cls: type[T]) -> type[T]:
    """Make ``cls`` a slotted dataclass, frozen to the type checker."""
    own = cls.__dict__
    made = dataclass(slots=True, **_NONE)(cls)
    for name in _METHODS.keys() - own.keys():
        setattr(made, name, _MethodToBe(made, name))
    if "__hash__" not in own:
        made.__hash__ = None  # type: ignore[assignment]  # as dataclass does for classes that are not frozen
    return made


class _MethodToBe:
    """Stands in a class for a method. The first access replaces it by the method that ``dataclass`` compiles."""

    __slots__ = ("_cls", "_name")

    def __init__(self, cls: type, name: str) -> None:
        self._cls = cls
        self._name = name

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        cls, name = self._cls, self._name
        # It is compiled for a class that inherits all fields: dataclass would not find the defaults of a slotted class.
        names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
        heir = type(cls)(cls.__name__, (cls,), names)
        method = dataclass(**{**_NONE, _METHODS[name]: True})(heir).__dict__[name]
        setattr(cls, name, method)  # two threads may both do this, with methods that do the same
        return method.__get__(instance, owner)
