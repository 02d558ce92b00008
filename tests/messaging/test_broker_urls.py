"""Brokers by URL: the scheme chooses the class, and errors say what to write without repeating a password."""

from __future__ import annotations

import pytest

from semel.errors import ConfigurationError
from semel.messaging.brokers.urls import BROKER_KINDS, BROKER_SCHEMES, open_broker, open_source


def test_every_scheme_opens_one_kind() -> None:
    schemes = [scheme for kind in BROKER_KINDS for scheme in kind.schemes]
    assert len(schemes) == len(set(schemes)) == len(BROKER_SCHEMES)
    assert {"kafka", "amqp", "nats", "redis", "sqs", "https"} <= set(schemes)


@pytest.mark.parametrize("url", ["user:secret@host", "pigeon://user:secret@host"])
def test_what_is_no_broker_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(ConfigurationError, match="kafka") as raised:
        open_broker(url)
    assert "secret" not in str(raised.value)


def test_nothing_can_be_consumed_from_a_webhook() -> None:
    with pytest.raises(ConfigurationError, match="webhooks"):
        open_source("https://example.test/hook")
