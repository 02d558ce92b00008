"""A batch of Ops as one program: those of one kind go out as one statement, those of one record keep their order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from semel.core.ops import Op
from semel.sql.program import Program

__all__ = ["PENDING", "batch"]

PENDING: Final = object()
"""The answer of an Op that has none yet."""


def batch(
    ops: Sequence[Op[Any]],
    answers: list[Any] | None,
    programs: Mapping[type[Op[Any]], Callable[[Any], Program[list[Any]]]],
) -> Program[list[Any]]:
    """All Ops of a batch, by the programs of a dialect, each for Ops of one kind.

    ``answers`` is filled in as they come: when the program breaks off, what is answered there is committed.
    """
    if answers is None:
        answers = [PENDING] * len(ops)
    for group in _groups(ops):
        # Rows are locked in the order they are given in: the same for all, so that two batches cannot deadlock.
        group.sort(key=lambda i: ops[i].id)
        found = yield from programs[type(ops[group[0]])]([ops[i] for i in group])
        for i, answer in zip(group, found, strict=True):
            answers[i] = answer
    return answers


def _groups(ops: Sequence[Op[Any]]) -> list[list[int]]:
    """Positions of Ops of one kind, no id twice in a group: a statement can touch a row only once."""
    groups: list[list[int]] = []
    open_group: dict[type[Op[Any]], int] = {}
    last_seen: dict[bytes, int] = {}
    for i, op in enumerate(ops):
        kind = type(op)
        at = open_group.get(kind, -1)
        if at <= last_seen.get(op.id, -1):
            at = open_group[kind] = len(groups)
            groups.append([])
        groups[at].append(i)
        last_seen[op.id] = at
    return groups
