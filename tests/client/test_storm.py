"""Clients that are killed, behind a network that loses what it can. The full run: ``python -m bench.client_storm``."""

from __future__ import annotations

import pytest

from bench.client_storm import FAULTS, storm

pytestmark = [pytest.mark.faults, pytest.mark.slow]


@pytest.mark.parametrize("client", ["requests", "httpx-async"])  # what each library does alone: see test_clients.py
def test_what_left_a_client_is_executed_once(client: str) -> None:
    verdict = storm(client, 20, longest_life=15, outages=True)
    assert verdict.operations >= 20
    assert verdict.kills >= 2
    assert set(verdict.faults) <= set(FAULTS)
    assert (verdict.duplicates, verdict.lost, verdict.wrong) == ([], [], [])
    assert verdict.executed + len(verdict.unknown) >= verdict.operations


def test_without_a_journal_operations_are_lost() -> None:
    assert any(storm("httpx", 30, longest_life=12, seed=seed, journal=False).lost for seed in range(1, 6))


def test_with_a_new_key_for_each_attempt_operations_are_executed_twice() -> None:
    assert any(storm("httpx", 20, longest_life=30, seed=seed, new_keys=True).duplicates for seed in range(1, 6))


def test_with_a_window_that_is_too_long_operations_are_executed_twice() -> None:
    assert any(
        storm("httpx", 20, longest_life=15, seed=seed, outages=True, window="30d").duplicates for seed in range(1, 9)
    )
