"""Which proofs of the conformance suite are played: all of them, or a sample where a twin plays them all."""

from __future__ import annotations

import pytest

from semel.testing.conformance import FAMILIES

WHOLE = ("race", "fencing")
SAMPLED = {proof for family in FAMILIES for proof in family.proofs[:: 1 if family.name in WHOLE else 3]}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A suite with ``sampled`` plays all races, all proofs of fencing and every third of the others.

    Its programs and statements are those of another suite that plays them all: only how they are sent differs. The
    random programs of a suite take a second also where there is no server.
    """
    for item in items:
        if item.name == "test_model":
            item.add_marker("slow")
    left_out = [item for item in items if is_left_out(item)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not is_left_out(item)]


def is_left_out(item: pytest.Item) -> bool:
    if (
        not isinstance(item, pytest.Function)
        or not getattr(item.cls, "sampled", False)
        or not hasattr(item, "callspec")
    ):
        return False
    proof = item.callspec.params.get("proof")
    return proof is not None and proof not in SAMPLED
