"""The protocols that a broker's adapter implements: a ``Broker`` to publish to, and a ``Source`` to consume from.

An adapter is async; the sync relay and the sync inbox run it in a thread of their own. It declares what the broker can
do; nothing is found out by trying. ``semel.testing.brokers`` tests an adapter against these protocols.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from semel.core.messaging.consuming import Delivery
from semel.core.messaging.messages import BrokerDown, DestinationDown, Message, Refused, Result, Sent, TryAgain
from semel.core.values import value

__all__ = [
    "Broker",
    "BrokerDown",
    "Capabilities",
    "Delivery",
    "DestinationDown",
    "Refused",
    "Result",
    "SeekableSource",
    "Sent",
    "Source",
    "TryAgain",
]


@value
class Capabilities:
    """What a broker can do, as its adapter declares it."""

    name: str
    """For people: ``Kafka``."""
    ordered: bool
    """Whether consumers get the messages of one stream in the order in which the broker took them."""
    pipelines: bool
    """Whether messages of one stream may be sent without waiting for each other's confirmation: if one of them fails,
    all that follow it fail as well. Otherwise the relay sends the next one when the last one is confirmed.
    One that follows a refused one of its stream is ``TryAgain``."""
    largest: int
    """The most bytes that data and headers may have together."""
    dedup_window: float = 0.0
    """Seconds in which the broker itself drops a repeated ``Message.broker_id``."""
    retention: float | None = None
    """Seconds after which the broker no longer delivers a message again; None if that is not known."""
    counts_starts: bool = False
    """Whether ``Delivery.starts`` counts, so that a message that kills its consumer is found."""
    seeks: bool = False
    """Whether the source is a ``SeekableSource``."""


class Broker(Protocol):
    """Publishes messages, from one event loop."""

    capabilities: Capabilities

    async def publish(self, messages: Sequence[Message], deadline: float) -> Sequence[Result]:
        """Send the messages and return a result for each, in their order. Raises nothing for what the broker does.

        Messages of one stream are handed to the broker in their order. A message without a destination goes to the
        default one, which the adapter knows.

        :param deadline: by ``time.monotonic()``. What is not confirmed by then is ``TryAgain``, and is no longer sent.
        """
        ...

    async def close(self) -> None:
        """Close the connection. Safe to call twice. ``publish`` opens it again."""
        ...


class Source(Protocol):
    """Delivers messages, in one event loop. A message that is not acknowledged is delivered again.

    That is so after ``close``, and after BrokerUnavailable, with which a caller lets go of all that it has not
    acknowledged and not postponed. Until then, a source keeps its messages from other consumers, however long a handler
    takes.
    """

    capabilities: Capabilities

    async def receive(self, limit: int, seconds: float) -> Sequence[Delivery]:
        """Return up to ``limit`` messages; wait at most ``seconds`` for the first. Raises BrokerUnavailable."""
        ...

    async def acknowledge(self, deliveries: Sequence[Delivery]) -> None:
        """Tell the broker that these are done. It returns when the broker knows. Raises BrokerUnavailable."""
        ...

    async def postpone(self, delivery: Delivery, seconds: float) -> None:
        """Have the message delivered again, after about ``seconds`` where the broker can wait.

        On an ordered source the messages of its stream that follow are not delivered before it. A caller that holds
        such messages postpones them as well, in their order.
        """
        ...

    async def close(self) -> None:
        """Stop consuming. What is not acknowledged goes back to the broker."""
        ...


class SeekableSource(Source, Protocol):
    """A source that can begin at offsets that are stored in the database of the effects, instead of at the broker's."""

    def begin_at(self, stored: Callable[[Sequence[str]], Mapping[str, int]]) -> None:
        """Call ``stored``, from any thread, for the offsets of places whenever this process gets them. It may raise."""
        ...
