"""From an annotation to the node that writes and rebuilds its values.

Compiled once, when a function is decorated. Names that do not exist yet at that time (a class further down the module,
an alias that names itself) are looked at when first used. What is not understood takes plain data.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from enum import Enum
from typing import Any, NewType, TypeVar, Union

from semel.core.encoding.classes import (
    Dataclass,
    EnumNode,
    NamedTupleNode,
    PydanticModel,
    Struct,
    is_pydantic_model,
    is_struct,
)
from semel.core.encoding.nodes import ITEM_TAGS, PLAIN_NODE, DictNode, Items, Later, Node, TypedDictNode, UnionNode
from semel.core.encoding.plain import decode_tree, encode_tree

__all__ = ["TypedSerializer", "compile_node"]

Bound = Mapping[Any, Any]


class TypedSerializer:
    """The serializer of a function whose return annotation names classes to rebuild."""

    name = "typed"

    def __init__(self, node: Node) -> None:
        self._node = node

    def encode(self, value: Any) -> bytes:
        return encode_tree(self._node.lower, value)

    def decode(self, payload: bytes) -> Any:
        return decode_tree(self._node.lift, payload)


def compile_node(annotation: Any, bound: Bound | None = None, pending: frozenset[Any] = frozenset()) -> Node:
    """The node of an annotation; :data:`PLAIN_NODE` itself where it names no class to rebuild.

    ``bound`` says what the type variables in scope stand for; ``pending`` holds what is being compiled around this.
    """
    bound = bound or {}
    if isinstance(annotation, TypeVar):
        return compile_node(bound[annotation], pending=pending) if annotation in bound else PLAIN_NODE
    if isinstance(annotation, NewType):
        return compile_node(annotation.__supertype__, bound, pending)
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Annotated, typing.Required, typing.NotRequired, typing.Final):
        return compile_node(args[0], bound, pending)
    if _is_alias(alias := origin or annotation):
        if alias in pending:
            return Later(lambda: compile_node(annotation, bound))
        return compile_node(alias.__value__, _scope(alias, args, bound), pending | {alias})
    if origin is typing.Literal:
        return _union([compile_node(type(value)) for value in args])
    if origin in (Union, types.UnionType):
        return _union([compile_node(arm, bound, pending) for arm in args])
    cls = origin or annotation
    if not isinstance(cls, type):
        return PLAIN_NODE
    if cls in (list, set, frozenset, tuple, dict) or cls.__module__ == "collections.abc":
        return _container(cls, args, [compile_node(arg, bound, pending) for arg in args if arg is not Ellipsis])
    return _class(annotation, cls, _scope(cls, args, bound), pending)


def _container(cls: type, args: tuple[Any, ...], items: list[Node]) -> Node:
    if all(item is PLAIN_NODE for item in items):
        return PLAIN_NODE
    if len(items) == 2 and issubclass(dict, cls):
        return DictNode(items[0], items[1])
    if cls is tuple and Ellipsis not in args:
        return Items({tuple: "$tuple"}, None, items)
    # An abstract annotation such as Sequence[X] says nothing of the class: each concrete one keeps its own tag.
    tags = {kind: tag for kind, tag in ITEM_TAGS.items() if issubclass(kind, cls)}
    return Items(tags, items[0], []) if tags and len(items) == 1 else PLAIN_NODE


def _class(annotation: Any, cls: Any, bound: Bound, pending: frozenset[Any]) -> Node:
    if typing.is_typeddict(cls):
        return _typed_dict(annotation, cls, bound, pending)
    if issubclass(cls, Enum):
        return EnumNode(cls)
    if issubclass(cls, tuple) and hasattr(cls, "_fields"):
        return NamedTupleNode(cls, lambda: _compiled(cls._fields, _hints(cls), bound))
    if is_pydantic_model(cls):
        return PydanticModel(cls, lambda: _compiled(cls.model_fields, _model_hints(cls), bound))
    if is_struct(cls):
        return Struct(cls, annotation)
    if dataclasses.is_dataclass(cls) and _holds_only_attributes(cls):
        return Dataclass(cls, lambda: _compiled([item.name for item in dataclasses.fields(cls)], _hints(cls), bound))
    return PLAIN_NODE


def _typed_dict(annotation: Any, cls: Any, bound: Bound, pending: frozenset[Any]) -> Node:
    later = Later(lambda: compile_node(annotation, bound))
    if cls in pending:
        return later
    try:
        hints = typing.get_type_hints(cls)
    except NameError:
        return later
    fields = {name: compile_node(hint, bound, pending | {cls}) for name, hint in hints.items()}
    return PLAIN_NODE if all(node is PLAIN_NODE for node in fields.values()) else TypedDictNode(fields)


def _union(arms: list[Node]) -> Node:
    arms = [arm for arm in arms if arm is not PLAIN_NODE]
    return UnionNode(arms) if arms else PLAIN_NODE


def _compiled(names: Any, hints: Mapping[str, Any], bound: Bound) -> dict[str, Node]:
    return {name: compile_node(hints.get(name, Any), bound) for name in names}


def _hints(cls: Any) -> dict[str, Any]:
    try:
        return typing.get_type_hints(cls, localns={cls.__name__: cls})
    except (NameError, TypeError, AttributeError):  # names that only a function's own scope knows
        fields = getattr(cls, "__dataclass_fields__", {})
        return {name: field.type for name, field in fields.items() if not isinstance(field.type, str)}


def _model_hints(cls: Any) -> dict[str, Any]:
    return {name: field.annotation for name, field in cls.model_fields.items()}


def _scope(generic: Any, args: tuple[Any, ...], bound: Bound) -> Bound:
    variables: Any = getattr(generic, "__parameters__", None) or getattr(generic, "__type_params__", ())
    return {variable: bound.get(arg, arg) for variable, arg in zip(variables, args, strict=False)}


def _is_alias(annotation: Any) -> bool:
    """Whether it is a ``type X = …`` of Python 3.12, or of typing_extensions."""
    return type(annotation).__name__ == "TypeAliasType" and type(annotation).__module__.startswith("typing")


def _holds_only_attributes(cls: Any) -> bool:
    """Whether an instance's state is its attributes: no dict, exception or the like underneath, nothing abstract."""
    try:
        object.__new__(cls)
    except TypeError:
        return False
    return True
