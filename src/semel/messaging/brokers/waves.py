"""The order of streams in a batch, for brokers that take the messages of a stream without waiting in between."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from semel.core.messaging.messages import Message, Refused, Result, Sent, TryAgain

FOLLOWS: Final = TryAgain("an earlier message of its stream was not sent")


async def send_in_waves(
    messages: Sequence[Message],
    place: Callable[[Message], str],
    refuse: Callable[[Message], Refused | None],
    send: Callable[[Sequence[Message]], Awaitable[Sequence[Result]]],
) -> list[Result]:
    """Send messages so that none is sent after an earlier one of its stream that failed. Returns a result for each.

    A broker promises no order between two places. If a stream goes to a second one, the messages for the first one are
    confirmed before.

    :param place: the topic or queue of a message.
    :param refuse: why a message cannot be sent, if that is known before.
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
            if (refused := refuse(message)) is not None:
                results[at] = refused
                failed |= {stream} - {""}
            elif stream and places.setdefault(stream, where := place(message)) != where:
                places[stream] = ""  # what follows in the stream waits as well
                later.append(at)
            else:
                wave.append(at)
        for at, result in zip(wave, await send([messages[at] for at in wave]) if wave else (), strict=True):
            results[at] = result
            if type(result) is not Sent:
                failed |= {messages[at].stream} - {""}
        waiting = later
    return results
