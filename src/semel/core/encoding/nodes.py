"""The shapes of annotated values: containers and unions whose items are more than plain data.

A node is a pair of ``lower`` (value → tagged tree of ``plain.py``) and ``lift`` (tree → value). Each takes any plain
value besides its own: a ``float`` field may hold ``100``, a function annotated ``-> list[Payment]`` may return None.
Such a value is written plainly and comes back as it was. This module knows no classes: those are in ``records.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from typing import Any

from semel.core.encoding.plain import lift, lift_pairs, lower, lower_dict, tag_of
from semel.core.encoding.snapshot import NotSerializable, SnapshotUnreadable

__all__ = ["ITEM_TAGS", "PLAIN_NODE", "DictNode", "Items", "Later", "Node", "TypedDictNode", "UnionNode"]


class Node:
    """Plain data, and the base of the rest."""

    def lower(self, value: Any, depth: int) -> Any:
        return lower(value, depth)

    def lift(self, tree: Any) -> Any:
        return lift(tree)


PLAIN_NODE = Node()


class Later(Node):
    """An annotation that names itself, or a class that does not exist yet: compiled when first used."""

    def __init__(self, make: Callable[[], Node]) -> None:
        self._make = make

    @cached_property
    def _node(self) -> Node:
        node = self._make()
        return PLAIN_NODE if isinstance(node, Later) else node

    def lower(self, value: Any, depth: int) -> Any:
        return self._node.lower(value, depth)

    def lift(self, tree: Any) -> Any:
        return self._node.lift(tree)


ITEM_TAGS: dict[type, str] = {list: "", tuple: "$tuple", set: "$set", frozenset: "$frozenset"}


class Items(Node):
    """A list, tuple, set or frozenset; all items alike (``each``), or one node for each place (``places``)."""

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


class DictNode(Node):
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


class TypedDictNode(Node):
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


class UnionNode(Node):
    """The arm that takes the value is written beside it; plain values need none."""

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
