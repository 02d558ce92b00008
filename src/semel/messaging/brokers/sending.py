"""What adapters share when they publish: reasons why a message is not sent, and the order of streams in a batch."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from semel.core.messaging.messages import Message, Refused, Result, Sent, TryAgain, oversize

FOLLOWS: Final = TryAgain("an earlier message of its stream was not sent")
LATE: Final = TryAgain("not sent before the deadline")


def too_large(message: Message, largest: int) -> Refused | None:
    """Refuse a message with more than ``largest`` bytes of data and headers."""
    size = oversize(message, largest)
    return Refused(f"the message has {size} bytes, and the most is {largest}") if size else None


async def send_in_waves(
    messages: Sequence[Message],
    place: Callable[[Message], str],
    refuse: Callable[[Message], Refused | None],
    send: Callable[[Sequence[Message]], Awaitable[Sequence[Result]]],
) -> list[Result]:
    """Send a batch to a broker that pipelines, and return a result for each message.

    No message is sent after an earlier one of its stream that failed. A broker keeps no order between two places: if a
    stream goes to a second place, the messages for the first one are confirmed before.

    :param place: returns the topic or queue of a message.
    :param refuse: returns why a message cannot be sent, or None.
    :param send: sends messages. If one fails, all that follow it in its stream and place fail as well.
    """
    results: list[Result] = [FOLLOWS] * len(messages)
    failed: set[str] = set()
    waiting = list(range(len(messages)))
    while waiting:
        places: dict[str, str] = {}
        wave, later = list[int](), list[int]()
        for at in waiting:
            message = messages[at]
            stream = message.stream
            if failed and stream in failed:
                continue
            if stream and places.get(stream) == "":  # one before it in the stream waits
                later.append(at)
            elif (refused := refuse(message)) is not None:
                results[at] = refused
                failed |= {stream} - {""}
            elif stream and places.setdefault(stream, where := place(message)) != where:
                places[stream] = ""
                later.append(at)
            else:
                wave.append(at)
        for at, result in zip(wave, await send([messages[at] for at in wave]) if wave else (), strict=True):
            results[at] = result
            if type(result) is not Sent:
                failed |= {messages[at].stream} - {""}
        waiting = later
    return results
