"""A broker in memory for the tests of consumers: it delivers again what was not acknowledged, and counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from semel.core.messaging.messages import Message
from semel.errors import BrokerUnavailable
from semel.messaging.ports import Capabilities, Delivery


class ListSource:
    """Delivers a list of messages, in order. A postponed message is delivered again at once."""

    def __init__(
        self,
        messages: Sequence[Message],
        *,
        counts: bool = True,
        ordered: bool = True,
        retention: float | None = None,
        place: str = "",
        first: int = 0,
    ) -> None:
        """
        :param place: deliver as a source that seeks, in this place of a log, from the offset ``first`` on.
        """
        self.capabilities = Capabilities(
            name="a list", ordered=ordered, pipelines=True, largest=1 << 20, retention=retention, counts_starts=counts,
            seeks=bool(place),
        )  # fmt: skip
        self.place, self.first = place, first
        self.stored: Callable[[Sequence[str]], Mapping[str, int]] = lambda places: {}
        self.waiting = list(enumerate(messages))
        self.delivered: Counter[int] = Counter()
        self.in_hand: dict[int, Message] = {}
        self.acknowledged: list[str] = []
        self.postponed: list[tuple[str, float]] = []
        self.down = 0
        """How many further calls fail."""

    def add(self, *messages: Message) -> None:
        start = max([at for at, _ in self.waiting] + list(self.delivered) + list(self.in_hand), default=-1) + 1
        self.waiting += list(enumerate(messages, start))

    def _fail(self) -> None:
        if self.down:
            self.down -= 1
            raise BrokerUnavailable("the list is down")

    async def receive(self, limit: int, seconds: float) -> Sequence[Delivery]:
        self._fail()
        found, self.waiting = self.waiting[:limit], self.waiting[limit:]
        self.in_hand.update(found)
        self.delivered.update(at for at, _ in found)
        counts = self.capabilities.counts_starts
        return [
            Delivery(message, self.delivered[at] if counts else 0, at, self.place, self.first + at)
            for at, message in found
        ]

    def begin_at(self, stored: Callable[[Sequence[str]], Mapping[str, int]]) -> None:
        self.stored = stored

    async def acknowledge(self, deliveries: Sequence[Delivery]) -> None:
        self._fail()
        for delivery in deliveries:
            del self.in_hand[delivery.handle]
            self.acknowledged.append(delivery.message.id)

    async def postpone(self, delivery: Delivery, seconds: float) -> None:
        self.postponed.append((delivery.message.id, seconds))
        self.waiting.append((delivery.handle, self.in_hand.pop(delivery.handle)))
        self.waiting.sort(key=lambda each: each[0])

    async def close(self) -> None:
        self.waiting = sorted([*self.in_hand.items(), *self.waiting], key=lambda each: each[0])
        self.in_hand.clear()
