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


@pytest.mark.parametrize(
    "url",
    [
        "kafka://[::1/orders",
        "nats://user:secret@ho\u2100st/orders",  # urlsplit quotes all of it
        "redis://:secret@ho\u2100st/0?stream=orders",
        "amqp://user:secret@ho\u2100st/?queue=orders",
        "amqp://user:secret@host:none/?queue=orders",
        "amqp://user:secret@host:99999/?queue=orders",
        "amqp:///?queue=orders",
        "sqs://not a region/orders",
        "sqs://eu-central-1/orders?endpoint=nowhere",
    ],
)
def test_a_url_that_nobody_could_connect_to_is_refused_at_once_without_its_password(url: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        open_broker(url)
    assert "secret" not in str(raised.value)
