"""The order of streams in a batch that is pipelined."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from semel.core.messaging.messages import Message, Refused, Result, Sent, TryAgain
from semel.messaging.brokers.sending import FOLLOWS, send_in_waves


def message(stream: str, sequence: int, destination: str = "one") -> Message:
    return Message(f"{stream}{sequence}", "t", b"", destination=destination, stream=stream, sequence=sequence)


def send(messages: Sequence[Message], *, bad: str = "", large: str = "") -> tuple[list[Result], list[list[str]]]:
    waves: list[list[str]] = []

    async def to_broker(some: Sequence[Message]) -> Sequence[Result]:
        waves.append([each.id for each in some])
        return [TryAgain("bad") if each.id == bad else Sent() for each in some]

    def refuse(each: Message) -> Refused | None:
        return Refused("large") if each.id == large else None

    results = asyncio.run(send_in_waves(messages, lambda each: each.destination, refuse, to_broker))
    return results, waves


def test_all_go_at_once_if_each_stream_stays_in_its_place() -> None:
    messages = [message("a", 1), message("b", 1, "two"), message("a", 2), message("", 0, "two"), message("", 0)]
    assert send(messages) == ([Sent()] * 5, [["a1", "b1", "a2", "0", "0"]])


def test_a_stream_goes_to_a_second_place_when_the_first_has_confirmed() -> None:
    messages = [message("a", 1), message("a", 2, "two"), message("a", 3), message("b", 1, "two")]
    assert send(messages) == ([Sent()] * 4, [["a1", "b1"], ["a2"], ["a3"]])


def test_nothing_follows_a_message_that_was_refused_or_not_sent() -> None:
    messages = [message("a", 1), message("a", 2), message("b", 1), message("", 0), message("", 0)]
    assert send(messages, large="a1") == ([Refused("large"), FOLLOWS, *[Sent()] * 3], [["b1", "0", "0"]])
    messages = [message("a", 1), message("a", 2, "two"), message("b", 1)]
    assert send(messages, bad="a1") == ([TryAgain("bad"), FOLLOWS, Sent()], [["a1", "b1"]])


def test_a_message_that_is_refused_fails_none_before_it() -> None:
    messages = [message("a", 1), message("a", 2, "two"), message("a", 3), message("a", 4)]
    assert send(messages, large="a3") == ([Sent(), Sent(), Refused("large"), FOLLOWS], [["a1"], ["a2"]])


def test_an_empty_batch_sends_nothing() -> None:
    assert send([]) == ([], [])
