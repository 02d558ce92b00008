"""Routes with effects outside: what a stored failure means, and how a handler says that nothing happened."""

from __future__ import annotations

import logging
from typing import Any

import flask
import pytest

from semel import MemoryStore, Semel
from semel.errors import NotResolvable
from semel.http.contract.rules import RELEASED
from semel.http.flask import idempotent, install

KEY = {"Idempotency-Key": "secret-key"}


def test_a_handler_that_knows_that_nothing_happened_keeps_its_key_free() -> None:
    app, statuses = flask.Flask("shop"), [503, 500, 200]
    with Semel(MemoryStore(), sweep_every=None) as guard:
        install(app, guard=guard, tenant=lambda request: "alice")

        @app.post("/charge")
        @idempotent(external_effects=True, released=RELEASED | {503})
        def charge() -> Any:
            return "said", statuses.pop(0)

        answers = [app.test_client().post("/charge", headers=KEY) for _ in range(3)]
        assert [answer.status_code for answer in answers] == [503, 500, 500], "the 503 freed the key, the 500 did not"
        assert "Idempotent-Replayed" in answers[2].headers
        with pytest.raises(NotResolvable, match="a finished record never changes: use a new key"):
            guard.release("POST /charge", "secret-key", tenant="alice", force=True)


@pytest.mark.parametrize("happened", [True, False])
def test_who_settles_an_operation_leaves_a_line_in_the_log(happened: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "semel.guard")
    now = [0.0]
    with Semel(MemoryStore(clock=lambda: now[0]), sweep_every=None) as guard:
        attempt = guard.begin(guard.make_call("charge", "secret-key", "", b"", guard.policy))
        now[0] += 60
        if happened:
            guard.resolve("charge", "secret-key", "paid")
        else:
            guard.release("charge", "secret-key")
        del attempt
    (line,) = [record.getMessage() for record in caplog.records]
    assert f"resolved or released the operation (it happened: {happened})" in line
    assert "secret-key" not in line
