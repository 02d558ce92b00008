"""The classes that an annotation may name: Enum, NamedTuple, dataclass, pydantic model, msgspec Struct.

Each becomes a tag with the class's name and its state. The name is only compared with the class that the annotation
gives; nothing is ever looked up or imported by a name from the store. Only the class itself is taken: an instance of a
subclass would come back as less than it was.

A dataclass or pydantic model is rebuilt from its state, without ``__init__``, ``__post_init__`` or validators: running
them again could change the value, or do something. That also keeps what a dump leaves out: excluded and private fields,
aliases that differ in and out, which fields were set. Where a field holds what only pydantic or msgspec can write (a
URL, a path), their own JSON is used, and read back once before it is trusted.

A class may change while its records live: a new field takes its default; a field that is gone, or a renamed class, is
refused rather than guessed. pydantic and msgspec are not imported here: where a model is at hand, its library is.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterable, Mapping
from enum import Flag
from functools import cached_property
from typing import Any

from semel.core.encoding.nodes import Node
from semel.core.encoding.plain import lift, lower, tag_of
from semel.core.encoding.snapshot import NotSerializable, SnapshotUnreadable

__all__ = ["Dataclass", "EnumNode", "NamedTupleNode", "PydanticModel", "Struct", "is_pydantic_model", "is_struct"]

Compile = Callable[[], Mapping[str, Node]]
"""The nodes of a class's fields, asked for when first used: by then every name in the annotations exists."""


def is_pydantic_model(cls: type) -> bool:
    pydantic = sys.modules.get("pydantic")
    return hasattr(pydantic, "TypeAdapter") and issubclass(cls, pydantic.BaseModel)  # type: ignore[union-attr]


def is_struct(cls: type) -> bool:
    msgspec = sys.modules.get("msgspec")
    return msgspec is not None and issubclass(cls, msgspec.Struct)


class _ClassNode(Node):
    """One class, exactly. The tree is ``{tag: [name of the class, state]}``."""

    tag = "$object"

    def __init__(self, cls: Any) -> None:
        self._cls = cls

    def lower(self, value: Any, depth: int) -> Any:
        if type(value) is not self._cls or depth <= 0:
            return lower(value, depth)
        return {self.tag: [self._cls.__qualname__, self._state(value, depth - 1)]}

    def lift(self, tree: Any) -> Any:
        tag, body = tag_of(tree)
        if tag != self.tag:
            return lift(tree)
        name, state = body
        if name != self._cls.__qualname__:
            raise SnapshotUnreadable(
                f"the stored result holds a {name!r} where the annotation now says {self._cls.__qualname__!r}"
            )
        return self._rebuilt(state)

    def _state(self, value: Any, depth: int) -> Any:
        raise NotImplementedError

    def _rebuilt(self, state: Any) -> Any:
        raise NotImplementedError


class EnumNode(_ClassNode):
    tag = "$enum"

    def _state(self, value: Any, depth: int) -> Any:
        # By name, so that a member's value may be anything; a combination of flags has no name, but a number.
        return value.value if isinstance(value, Flag) else value.name

    def _rebuilt(self, state: Any) -> Any:
        return self._cls(state) if issubclass(self._cls, Flag) else self._cls.__members__[state]


class _Fields(_ClassNode):
    """A class with named, annotated fields."""

    def __init__(self, cls: Any, compile_fields: Compile) -> None:
        super().__init__(cls)
        self._compile_fields = compile_fields

    @cached_property
    def _nodes(self) -> Mapping[str, Node]:
        return self._compile_fields()

    def _lower_fields(self, values: Mapping[str, Any], depth: int) -> dict[str, Any]:
        try:
            return {name: node.lower(values[name], depth) for name, node in self._nodes.items()}
        except KeyError as exc:
            raise NotSerializable(f"a {self._cls.__qualname__} lacks its field {exc}") from exc

    def _lift_fields(self, trees: Mapping[str, Any]) -> dict[str, Any]:
        if gone := trees.keys() - self._nodes.keys():
            raise SnapshotUnreadable(
                f"the stored {self._cls.__qualname__} has fields that the class no longer has: {sorted(gone)}"
            )
        values = {}
        for name, node in self._nodes.items():
            if name in trees:
                values[name] = node.lift(trees[name])
            else:
                try:
                    values[name] = self._default(name)
                except KeyError as exc:
                    raise SnapshotUnreadable(
                        f"the stored {self._cls.__qualname__} is older than its field {name!r}, which has no default"
                    ) from exc
        return values

    def _default(self, name: str) -> Any:
        """The default of a field; KeyError where it has none."""
        raise NotImplementedError

    def _extras(self, attributes: Mapping[str, Any]) -> dict[str, Any]:
        """What an instance holds beside its fields; what it has only cached is left to be computed again."""
        return {
            name: value
            for name, value in attributes.items()
            if name not in self._nodes and not isinstance(getattr(self._cls, name, None), cached_property)
        }


class NamedTupleNode(_Fields):
    def _state(self, value: Any, depth: int) -> Any:
        if getattr(value, "__dict__", None):
            raise NotSerializable(f"a {self._cls.__qualname__} with attributes beside its fields would lose them")
        return self._lower_fields(value._asdict(), depth)

    def _rebuilt(self, state: Any) -> Any:
        return tuple.__new__(self._cls, self._lift_fields(state).values())

    def _default(self, name: str) -> Any:
        return self._cls._field_defaults[name]


class Dataclass(_Fields):
    def _state(self, value: Any, depth: int) -> Any:
        values = {name: getattr(value, name) for name in self._nodes if hasattr(value, name)}
        extras = self._extras(getattr(value, "__dict__", {}))
        return [self._lower_fields(values, depth), lower(extras, depth)]

    def _rebuilt(self, state: Any) -> Any:
        trees, extras = state
        made = object.__new__(self._cls)
        for name, value in (self._lift_fields(trees) | lift(extras)).items():
            object.__setattr__(made, name, value)  # frozen or not
        return made

    def _default(self, name: str) -> Any:
        field = self._cls.__dataclass_fields__[name]
        if field.default_factory is not dataclasses.MISSING:
            return field.default_factory()
        if field.default is dataclasses.MISSING:
            raise KeyError(name)
        return field.default


class PydanticModel(_Fields):
    @cached_property
    def _adapter(self) -> Any:
        return sys.modules["pydantic"].TypeAdapter(self._cls)

    def _state(self, value: Any, depth: int) -> Any:
        try:
            return self._exact(value, depth)
        except NotSerializable:
            text = self._dumped(value)
            if text is None:
                raise
            return text

    def _exact(self, value: Any, depth: int) -> list[Any]:
        state = value.__getstate__()
        attributes = state["__dict__"]
        beside = self._extras(attributes), state.get("__pydantic_extra__"), state.get("__pydantic_private__")
        fields_set = sorted(state["__pydantic_fields_set__"])
        return [self._lower_fields(attributes, depth), fields_set, *[lower(each, depth) for each in beside]]

    def _dumped(self, value: Any) -> str | None:
        try:
            # by_alias: names as they are read; round_trip: without computed fields.
            dumped: bytes = self._adapter.dump_json(value, by_alias=True, round_trip=True, warnings=False)
            again = self._adapter.validate_json(dumped)
        except Exception:  # a model's serializers and validators may raise anything
            return None
        return dumped.decode("utf-8") if type(again) is self._cls and again == value else None

    def _rebuilt(self, state: Any) -> Any:
        if type(state) is str:
            return self._adapter.validate_json(state)
        trees, fields_set, extras, extra, private = state
        made = self._cls.__new__(self._cls)
        made.__setstate__(
            {
                "__dict__": self._lift_fields(trees) | lift(extras),
                "__pydantic_fields_set__": set(fields_set),
                "__pydantic_extra__": lift(extra),
                "__pydantic_private__": lift(private),
            }
        )
        return made

    def _default(self, name: str) -> Any:
        field = self._cls.model_fields[name]
        if field.is_required():
            raise KeyError(name)
        return field.get_default(call_default_factory=True)


class Struct(_ClassNode):
    """``annotation`` is the class, or the class with its type arguments."""

    def __init__(self, cls: Any, annotation: Any) -> None:
        super().__init__(cls)
        self._annotation = annotation

    @cached_property
    def _json(self) -> Any:
        return sys.modules["msgspec"].json

    def _state(self, value: Any, depth: int) -> Any:
        try:
            text: str = self._json.encode(value).decode("utf-8")
            again = self._json.decode(text, type=self._annotation)
        except Exception as exc:  # a hook may raise anything
            raise NotSerializable(f"msgspec cannot write this {self._cls.__qualname__}: {exc}") from exc
        names: Iterable[str] = self._cls.__struct_fields__
        if type(again) is not self._cls or any(getattr(again, name) != getattr(value, name) for name in names):
            raise NotSerializable(
                f"a {self._cls.__qualname__} holds what msgspec does not read back as it was: "
                "annotate its fields with the types they hold, or pass serializer="
            )
        return text

    def _rebuilt(self, state: Any) -> Any:
        return self._json.decode(state, type=self._annotation)
