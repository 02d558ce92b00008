"""The serializer of annotated results: it rebuilds the classes that a function's return annotation names.

An annotation is compiled once, when the function is decorated, into a tree of *nodes*. A node has ``lower`` (value →
tagged tree of ``plain.py``) and ``lift`` (tree → value). Names that do not exist yet at that time (a class further down
the module, an alias that names itself) are resolved when they are first used. An annotation that is not understood
stands for plain data. Every node also takes any plain value besides its own: a ``float`` field may hold ``100``, and a
function annotated ``-> list[Payment]`` may return None. Such a value is written plainly and comes back as it was.

The classes are Enum, NamedTuple, dataclass, pydantic model and msgspec Struct. An instance is stored as a tag with the
name of its class and its state. The name is only compared with the class in the annotation: nothing is ever looked up
or imported by a name from the store. An instance of a subclass is refused, because it would come back as its base.

A dataclass or pydantic model is rebuilt from its state, without ``__init__``, ``__post_init__`` or validators: running
them again could change the value or have an effect. This also preserves what a dump leaves out: excluded and private
fields, aliases that differ in and out, and which fields were set. Where a field holds a value that only pydantic or
msgspec can write (a URL, a path), their own JSON is used, after a check that it reads back as the same value.

A class may change while its records live. A new field takes its default. A removed field or a renamed class is refused
rather than guessed. pydantic and msgspec are never imported here: where there is a model, its library is loaded.
"""

from __future__ import annotations

import dataclasses
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from enum import Enum, Flag
from functools import cached_property
from typing import Any, NewType, Protocol, TypeVar, Union

from semel.core.encoding.plain import (
    ValueSerializer,
    decode_tree,
    encode_tree,
    lift,
    lift_pairs,
    lower,
    lower_dict,
    tag_of,
)
from semel.core.encoding.snapshot import NotSerializable
from semel.errors import SnapshotUnreadable

Scope = Mapping[Any, Any]
"""What each type variable in scope stands for."""


class Node(Protocol):
    """Writes and rebuilds the values of one annotation."""

    def lower(self, value: Any, depth: int) -> Any:
        """Return the tagged tree of the value, at most ``depth`` levels deep. Raises NotSerializable."""
        ...

    def lift(self, tree: Any) -> Any:
        """Return the value of a tagged tree."""
        ...


class TypedSerializer(ValueSerializer):
    """The serializer of a function whose return annotation names classes to rebuild."""

    name = "typed"

    def __init__(self, node: Node) -> None:
        self._node = node

    def encode(self, value: Any) -> bytes:
        return encode_tree(self._node.lower, value)

    def decode(self, payload: bytes) -> Any:
        return decode_tree(self._node.lift, payload)


# -- from an annotation to its node


def compile_node(annotation: Any, scope: Scope | None = None, pending: frozenset[Any] = frozenset()) -> Node:
    """Return the node of an annotation: ``PLAIN_NODE`` itself where it names no class to rebuild.

    :param scope: what the type variables stand for.
    :param pending: the aliases and typed dicts around this annotation, whose compilation is not finished.
    """
    scope = scope or {}
    if isinstance(annotation, TypeVar):
        return compile_node(scope[annotation], pending=pending) if annotation in scope else PLAIN_NODE
    if isinstance(annotation, NewType):
        return compile_node(annotation.__supertype__, scope, pending)
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Annotated, typing.Required, typing.NotRequired, typing.Final):
        return compile_node(args[0], scope, pending)
    if _is_alias(alias := origin or annotation):
        if alias in pending:
            return _Later(lambda: compile_node(annotation, scope))
        return compile_node(alias.__value__, _inner_scope(alias, args, scope), pending | {alias})
    if origin is typing.Literal:
        return _compile_union([compile_node(type(value)) for value in args])
    if origin in (Union, types.UnionType):
        return _compile_union([compile_node(arm, scope, pending) for arm in args])
    cls = origin or annotation
    if not isinstance(cls, type):
        return PLAIN_NODE
    if cls in (list, set, frozenset, tuple, dict) or cls.__module__ == "collections.abc":
        return _compile_container(cls, args, [compile_node(arg, scope, pending) for arg in args if arg is not Ellipsis])
    if typing.is_typeddict(cls):
        return _compile_typed_dict(annotation, cls, _inner_scope(cls, args, scope), pending)
    return _compile_class(annotation, cls, _inner_scope(cls, args, scope))


def _compile_container(cls: type, args: tuple[Any, ...], items: list[Node]) -> Node:
    if all(item is PLAIN_NODE for item in items):
        return PLAIN_NODE
    if len(items) == 2 and issubclass(dict, cls):
        return _Dict(items[0], items[1])
    if cls is tuple and Ellipsis not in args:
        return _Items({tuple: "$tuple"}, None, items)
    # An abstract annotation such as Sequence[X] does not name the class: each concrete one keeps its own tag.
    tags = {kind: tag for kind, tag in _ITEM_TAGS.items() if issubclass(kind, cls)}
    return _Items(tags, items[0], []) if tags and len(items) == 1 else PLAIN_NODE


def _compile_typed_dict(annotation: Any, cls: Any, scope: Scope, pending: frozenset[Any]) -> Node:
    later = _Later(lambda: compile_node(annotation, scope))
    if cls in pending:
        return later
    try:
        hints = typing.get_type_hints(cls)
    except NameError:
        return later
    fields = {name: compile_node(hint, scope, pending | {cls}) for name, hint in hints.items()}
    return PLAIN_NODE if all(node is PLAIN_NODE for node in fields.values()) else _TypedDict(fields)


def _compile_union(arms: list[Node]) -> Node:
    arms = [arm for arm in arms if arm is not PLAIN_NODE]
    return _Union(arms) if arms else PLAIN_NODE


def _compile_class(annotation: Any, cls: Any, scope: Scope) -> Node:
    if issubclass(cls, Enum):
        return _Class(cls, "$enum", _EnumState(cls))
    if issubclass(cls, tuple) and hasattr(cls, "_fields"):
        return _Class(cls, "$object", _NamedTupleState(cls, scope))
    if _is_pydantic_model(cls):
        return _Class(cls, "$object", _PydanticState(cls, scope))
    if _is_struct(cls):
        return _Class(cls, "$object", _StructState(cls, annotation))
    if dataclasses.is_dataclass(cls) and _holds_only_attributes(cls):
        return _Class(cls, "$object", _DataclassState(cls, scope))
    return PLAIN_NODE


def _hints(cls: Any, names: Iterable[str]) -> dict[str, Any]:
    """Return the annotations of these fields; Any for one that cannot be resolved."""
    try:
        hints = typing.get_type_hints(cls, localns={cls.__name__: cls})
    except (NameError, TypeError, AttributeError):  # a name that only a function's own scope knows
        fields = getattr(cls, "__dataclass_fields__", {})
        hints = {name: field.type for name, field in fields.items() if not isinstance(field.type, str)}
    return {name: hints.get(name, Any) for name in names}


def _inner_scope(generic: Any, args: tuple[Any, ...], scope: Scope) -> Scope:
    variables: Any = getattr(generic, "__parameters__", None) or getattr(generic, "__type_params__", ())
    return {variable: scope.get(arg, arg) for variable, arg in zip(variables, args, strict=False)}


def _is_alias(annotation: Any) -> bool:
    """Whether this is a ``type X = …`` of Python 3.12 or of typing_extensions."""
    return type(annotation).__name__ == "TypeAliasType" and type(annotation).__module__.startswith("typing")


def _is_pydantic_model(cls: type) -> bool:
    pydantic = sys.modules.get("pydantic")
    return hasattr(pydantic, "TypeAdapter") and issubclass(cls, pydantic.BaseModel)  # type: ignore[union-attr]


def _is_struct(cls: type) -> bool:
    msgspec = sys.modules.get("msgspec")
    return msgspec is not None and issubclass(cls, msgspec.Struct)


def _holds_only_attributes(cls: Any) -> bool:
    """Whether an instance's state is its attributes: it is no dict or exception underneath, and not abstract."""
    try:
        object.__new__(cls)
    except TypeError:
        return False
    return True


# -- containers and unions


class _Plain:
    """Plain data."""

    def lower(self, value: Any, depth: int) -> Any:
        return lower(value, depth)

    def lift(self, tree: Any) -> Any:
        return lift(tree)


PLAIN_NODE: Node = _Plain()


class _Later:
    """An annotation that names itself, or a class that does not exist yet: compiled when it is first used."""

    def __init__(self, make: Callable[[], Node]) -> None:
        self._make = make

    @cached_property
    def _node(self) -> Node:
        node = self._make()
        return PLAIN_NODE if isinstance(node, _Later) else node

    def lower(self, value: Any, depth: int) -> Any:
        return self._node.lower(value, depth)

    def lift(self, tree: Any) -> Any:
        return self._node.lift(tree)


_ITEM_TAGS: dict[type, str] = {list: "", tuple: "$tuple", set: "$set", frozenset: "$frozenset"}


class _Items:
    """A list, tuple, set or frozenset: all items alike (``each``), or one node for each place (``places``)."""

    def __init__(self, tags: Mapping[type, str], each: Node | None, places: list[Node]) -> None:
        self._tags, self._each, self._places = tags, each, places
        self._kinds = {tag: kind for kind, tag in tags.items()}

    def _nodes(self, count: int) -> Iterable[Node]:
        return self._places if self._each is None else [self._each] * count

    def lower(self, value: Any, depth: int) -> Any:
        tag = self._tags.get(type(value))
        if tag is None or depth <= 0 or (self._each is None and len(value) != len(self._places)):
            return lower(value, depth)
        items = [node.lower(item, depth - 1) for node, item in zip(self._nodes(len(value)), value, strict=True)]
        return {tag: items} if tag else items

    def lift(self, tree: Any) -> Any:
        tag, body = ("", tree) if type(tree) is list else tag_of(tree)
        kind = self._kinds.get(tag)
        if kind is None or type(body) is not list or (self._each is None and len(body) != len(self._places)):
            return lift(tree)
        return kind([node.lift(item) for node, item in zip(self._nodes(len(body)), body, strict=True)])


class _Dict:
    def __init__(self, key: Node, item: Node) -> None:
        self._key, self._item = key, item

    def lower(self, value: Any, depth: int) -> Any:
        if type(value) is not dict or depth <= 0:
            return lower(value, depth)
        return lower_dict(value, depth - 1, self._key.lower, self._item.lower)

    def lift(self, tree: Any) -> Any:
        tag, body = tag_of(tree)
        if tag == "$dict":
            return lift_pairs(body, self._key.lift, self._item.lift)
        if tag or type(tree) is not dict:
            return lift(tree)
        return {key: self._item.lift(item) for key, item in tree.items()}


class _TypedDict:
    def __init__(self, fields: Mapping[str, Node]) -> None:
        self._fields = fields

    def _node(self, key: str) -> Node:
        return self._fields.get(key, PLAIN_NODE)

    def lower(self, value: Any, depth: int) -> Any:
        if type(value) is not dict or depth <= 0 or any(type(key) is not str or key[:1] == "$" for key in value):
            return lower(value, depth)
        return {key: self._node(key).lower(item, depth - 1) for key, item in value.items()}

    def lift(self, tree: Any) -> Any:
        if type(tree) is not dict or tag_of(tree)[0]:
            return lift(tree)
        return {key: self._node(key).lift(item) for key, item in tree.items()}


class _Union:
    """A value that is not plain is written with the index of the arm that takes it."""

    def __init__(self, arms: list[Node]) -> None:
        self._arms = arms

    def lower(self, value: Any, depth: int) -> Any:
        try:
            return lower(value, depth)
        except NotSerializable as exc:
            refusal = exc
        for index, arm in enumerate(self._arms):
            try:
                return {"$union": [index, arm.lower(value, depth)]}
            except NotSerializable as exc:
                refusal = exc
        raise refusal

    def lift(self, tree: Any) -> Any:
        tag, body = tag_of(tree)
        if tag != "$union":
            return lift(tree)
        index, inner = body
        if type(index) is not int or not 0 <= index < len(self._arms):
            raise SnapshotUnreadable("the stored result was written under another union: the annotation has changed")
        return self._arms[index].lift(inner)


# -- classes


class _State(Protocol):
    """Takes the instances of one class apart and rebuilds them."""

    def dump(self, value: Any, depth: int) -> Any: ...

    def rebuild(self, state: Any) -> Any: ...


class _Class:
    """Exactly one class. The tree is ``{tag: [name of the class, state]}``."""

    def __init__(self, cls: Any, tag: str, state: _State) -> None:
        self._cls, self._tag, self._state = cls, tag, state

    def lower(self, value: Any, depth: int) -> Any:
        if type(value) is not self._cls or depth <= 0:
            return lower(value, depth)
        return {self._tag: [self._cls.__qualname__, self._state.dump(value, depth - 1)]}

    def lift(self, tree: Any) -> Any:
        tag, body = tag_of(tree)
        if tag != self._tag:
            return lift(tree)
        name, state = body
        if name != self._cls.__qualname__:
            raise SnapshotUnreadable(
                f"the stored result holds a {name!r} where the annotation now says {self._cls.__qualname__!r}"
            )
        return self._state.rebuild(state)


class _EnumState:
    def __init__(self, cls: Any) -> None:
        self._cls = cls

    def dump(self, value: Any, depth: int) -> Any:
        # By name, so that a member's value may be anything. A combination of flags has no name but has a number.
        return value.value if isinstance(value, Flag) else value.name

    def rebuild(self, state: Any) -> Any:
        return self._cls(state) if issubclass(self._cls, Flag) else self._cls.__members__[state]


class _Fields:
    """The named, annotated fields of a class. ``default`` returns a field's default, or raises KeyError."""

    def __init__(
        self, cls: Any, scope: Scope, hints: Callable[[], Mapping[str, Any]], default: Callable[[str], Any]
    ) -> None:
        self._cls, self._scope = cls, scope
        self._hints, self._default = hints, default

    @cached_property
    def nodes(self) -> Mapping[str, Node]:
        """Compiled at the first use: by then every name in the annotations exists."""
        return {name: compile_node(hint, self._scope) for name, hint in self._hints().items()}

    def lower(self, values: Mapping[str, Any], depth: int) -> dict[str, Any]:
        try:
            return {name: node.lower(values[name], depth) for name, node in self.nodes.items()}
        except KeyError as exc:
            raise NotSerializable(f"a {self._cls.__qualname__} lacks its field {exc}") from exc

    def lift(self, trees: Mapping[str, Any]) -> dict[str, Any]:
        if gone := trees.keys() - self.nodes.keys():
            raise SnapshotUnreadable(
                f"the stored {self._cls.__qualname__} has fields that the class no longer has: {sorted(gone)}"
            )
        values = {}
        for name, node in self.nodes.items():
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

    def others(self, attributes: Mapping[str, Any]) -> dict[str, Any]:
        """Return the attributes beside the fields. Cached properties are left out, to be computed again."""
        return {
            name: value
            for name, value in attributes.items()
            if name not in self.nodes and not isinstance(getattr(self._cls, name, None), cached_property)
        }


class _NamedTupleState:
    def __init__(self, cls: Any, scope: Scope) -> None:
        self._cls = cls
        self._fields = _Fields(cls, scope, lambda: _hints(cls, cls._fields), cls._field_defaults.__getitem__)

    def dump(self, value: Any, depth: int) -> Any:
        if getattr(value, "__dict__", None):
            raise NotSerializable(f"a {self._cls.__qualname__} with attributes beside its fields would lose them")
        return self._fields.lower(value._asdict(), depth)

    def rebuild(self, state: Any) -> Any:
        return tuple.__new__(self._cls, self._fields.lift(state).values())


class _DataclassState:
    def __init__(self, cls: Any, scope: Scope) -> None:
        self._cls = cls
        names = [field.name for field in dataclasses.fields(cls)]
        self._fields = _Fields(cls, scope, lambda: _hints(cls, names), self._default)

    def dump(self, value: Any, depth: int) -> Any:
        values = {name: getattr(value, name) for name in self._fields.nodes if hasattr(value, name)}
        others = self._fields.others(getattr(value, "__dict__", {}))
        return [self._fields.lower(values, depth), lower(others, depth)]

    def rebuild(self, state: Any) -> Any:
        trees, others = state
        instance = object.__new__(self._cls)
        for name, value in (self._fields.lift(trees) | lift(others)).items():
            object.__setattr__(instance, name, value)  # works for frozen classes too
        return instance

    def _default(self, name: str) -> Any:
        field = self._cls.__dataclass_fields__[name]
        if field.default_factory is not dataclasses.MISSING:
            return field.default_factory()
        if field.default is dataclasses.MISSING:
            raise KeyError(name)
        return field.default


class _PydanticState:
    def __init__(self, cls: Any, scope: Scope) -> None:
        self._cls = cls
        self._fields = _Fields(cls, scope, self._hints, self._default)

    def _hints(self) -> Mapping[str, Any]:
        return {name: field.annotation for name, field in self._cls.model_fields.items()}

    @cached_property
    def _adapter(self) -> Any:
        return sys.modules["pydantic"].TypeAdapter(self._cls)

    def dump(self, value: Any, depth: int) -> Any:
        try:
            return self._exact(value, depth)
        except NotSerializable:
            text = self._json(value)
            if text is None:
                raise
            return text

    def _exact(self, value: Any, depth: int) -> list[Any]:
        state = value.__getstate__()
        attributes = state["__dict__"]
        beside = self._fields.others(attributes), state.get("__pydantic_extra__"), state.get("__pydantic_private__")
        fields_set = sorted(state["__pydantic_fields_set__"])
        return [self._fields.lower(attributes, depth), fields_set, *[lower(each, depth) for each in beside]]

    def _json(self, value: Any) -> str | None:
        try:
            # by_alias: with the names that are read back; round_trip: without computed fields.
            text: bytes = self._adapter.dump_json(value, by_alias=True, round_trip=True, warnings=False)
            again = self._adapter.validate_json(text)
        except Exception:  # a model's serializers and validators may raise anything
            return None
        return text.decode("utf-8") if type(again) is self._cls and again == value else None

    def rebuild(self, state: Any) -> Any:
        if type(state) is str:
            return self._adapter.validate_json(state)
        trees, fields_set, others, extra, private = state
        instance = self._cls.__new__(self._cls)
        instance.__setstate__(
            {
                "__dict__": self._fields.lift(trees) | lift(others),
                "__pydantic_fields_set__": set(fields_set),
                "__pydantic_extra__": lift(extra),
                "__pydantic_private__": lift(private),
            }
        )
        return instance

    def _default(self, name: str) -> Any:
        field = self._cls.model_fields[name]
        if field.is_required():
            raise KeyError(name)
        return field.get_default(call_default_factory=True)


class _StructState:
    """``annotation`` is the class, or the class with its type arguments."""

    def __init__(self, cls: Any, annotation: Any) -> None:
        self._cls = cls
        self._annotation = annotation

    @cached_property
    def _json(self) -> Any:
        return sys.modules["msgspec"].json

    def dump(self, value: Any, depth: int) -> Any:
        try:
            text: str = self._json.encode(value).decode("utf-8")
            again = self._json.decode(text, type=self._annotation)
        except Exception as exc:  # a hook may raise anything
            raise NotSerializable(f"msgspec cannot write this {self._cls.__qualname__}: {exc}") from exc
        names: Iterable[str] = self._cls.__struct_fields__
        if type(again) is not self._cls or any(getattr(again, name) != getattr(value, name) for name in names):
            raise NotSerializable(
                f"a {self._cls.__qualname__} holds a value that msgspec does not read back as it was: "
                "annotate its fields with the types they hold, or pass serializer="
            )
        return text

    def rebuild(self, state: Any) -> Any:
        return self._json.decode(state, type=self._annotation)
