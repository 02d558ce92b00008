"""Amazon SQS, by boto3. Needs ``semel[sqs]``.

A FIFO queue keeps the order of every stream: the stream is the message group. It drops a repeat for five minutes. A
standard queue keeps no order. ``aws.py`` says how a message looks there.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from time import monotonic
from typing import Any, Final, Self

from semel.core.messaging.messages import read_message
from semel.core.policy import Duration, seconds
from semel.engine.background import BackgroundTask
from semel.errors import BrokerUnavailable, ConfigurationError
from semel.messaging.brokers.aws import (
    AT_ONCE,
    CONNECT_TIMEOUT,
    LARGEST,
    TIMEOUT,
    AWSBroker,
    AWSClient,
    aws_errors,
    decode,
    read_aws_url,
)
from semel.messaging.brokers.options import flag, number
from semel.messaging.ports import Capabilities, Delivery

VISIBILITY: Final = 30.0
LONGEST_POLL: Final = 20
LONGEST_DELAY: Final = 12 * 3600


class SQSBroker(AWSBroker):
    """Publishes to queues of SQS. They must exist. boto3 finds the credentials of the process."""

    def __init__(
        self,
        region: str,
        *,
        queue: str = "",
        fifo: bool | None = None,
        endpoint: str | None = None,
        largest: int = LARGEST,
        timeout: Duration = TIMEOUT,
        connect_timeout: Duration = CONNECT_TIMEOUT,
    ) -> None:
        """
        :param queue: the name of the queue for messages without a destination. A destination is a name, too.
        :param fifo: whether the queues are FIFO queues. Defaults to what the name of the queue says. A relay sends to
            queues of one kind.
        :param endpoint: the URL of a server to use instead of AWS.
        :param largest: the most bytes that a message may have.
        :param timeout: how long the service may take for one call.
        :param connect_timeout: how long it may take to connect.
        """
        super().__init__(
            "sqs", "MessageBody", self._send_entries, region, queue, fifo, endpoint, largest, timeout, connect_timeout
        )
        self._urls = _QueueURLs(self._client)

    @classmethod
    def from_url(cls, url: str) -> Self:
        """Open ``sqs://region/queue.fifo``; options: ``endpoint``, ``fifo``, ``largest``."""
        region, queue, options = read_aws_url(url, {"fifo": flag, "largest": number})
        return cls(region, queue=queue, **options)

    async def _send_entries(self, where: str, entries: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        url = await self._urls.find(where)
        try:
            return await self._client.call("send_message_batch", QueueUrl=url, Entries=entries)
        except aws_errors():
            self._urls.forget(where)  # the queue may have been deleted, and created again
            raise


class _QueueURLs:
    """The URLs of queues by their names."""

    def __init__(self, client: AWSClient) -> None:
        self._client = client
        self._known: dict[str, str] = {}

    async def find(self, queue: str) -> str:
        if queue not in self._known:
            reply = await self._client.call("get_queue_url", QueueName=queue)
            self._known[queue] = reply["QueueUrl"]
        return self._known[queue]

    def forget(self, queue: str) -> None:
        self._known.pop(queue, None)


class SQSSource:
    """Consumes from a queue of SQS."""

    def __init__(
        self,
        region: str,
        *,
        queue: str,
        endpoint: str | None = None,
        visibility: Duration = VISIBILITY,
        timeout: Duration = TIMEOUT,
        connect_timeout: Duration = CONNECT_TIMEOUT,
    ) -> None:
        """
        :param queue: the name of the queue.
        :param visibility: how long a process may show no sign of life before its messages are delivered again. While
            the source is open, it renews this time for all messages that are not acknowledged.
        :param endpoint: the URL of a server to use instead of AWS.
        :param timeout: how long the service may take for one call.
        :param connect_timeout: how long it may take to connect.
        """
        if not queue:
            raise ConfigurationError("a source of SQS needs the name of a queue: sqs://region/queue")
        read = seconds(timeout, "timeout") + LONGEST_POLL
        self._client = AWSClient("sqs", region, endpoint, read, seconds(connect_timeout, "connect_timeout"))
        self._queue = queue
        self._urls = _QueueURLs(self._client)
        self._visibility = max(1, int(seconds(visibility, "visibility")))
        self._in_hand: dict[str, None] = {}
        """The receipts of messages that were delivered, and are neither acknowledged nor postponed."""
        self._keeping = BackgroundTask("semel-sqs")
        self.capabilities = Capabilities(
            name="Amazon SQS", ordered=queue.endswith(".fifo"), pipelines=False, largest=LARGEST, counts_starts=True
        )

    @classmethod
    def from_url(cls, url: str) -> Self:
        """Open ``sqs://region/queue.fifo``; options: ``endpoint``, ``visibility``."""
        known: dict[str, Callable[[str], Any]] = {"visibility": seconds}
        region, queue, options = read_aws_url(url, known)
        return cls(region, queue=queue, **options)

    async def receive(self, limit: int, seconds: float) -> Sequence[Delivery]:
        until = monotonic() + seconds
        while True:
            left = max(0.0, until - monotonic())
            with self._letting_go():
                reply = await self._call(
                    "receive_message",
                    MaxNumberOfMessages=min(limit, AT_ONCE),
                    WaitTimeSeconds=min(LONGEST_POLL, int(left)),
                    VisibilityTimeout=self._visibility,
                    MessageAttributeNames=["All"],
                    AttributeNames=["ApproximateReceiveCount"],
                )
            found = [self._delivery(each) for each in reply.get("Messages", ())]
            if found or monotonic() >= until:
                self._in_hand |= dict.fromkeys(each.handle for each in found)
                self._keeping.start(self._keep_alive)
                return found
            await asyncio.sleep(min(0.2, max(0.0, until - monotonic())))

    async def acknowledge(self, deliveries: Sequence[Delivery]) -> None:
        handles = [delivery.handle for delivery in deliveries]
        with self._letting_go():
            failed = await self._for_each("delete_message_batch", handles)
            # Some servers report an error for a message that was acknowledged before.
            reasons = [reason for handle, reason in failed.items() if handle in self._in_hand]
            for handle in handles:
                self._in_hand.pop(handle, None)
            if reasons:
                raise BrokerUnavailable(f"SQS did not delete {len(reasons)} messages; they come again: {reasons[0]}")

    async def postpone(self, delivery: Delivery, seconds: float) -> None:
        self._in_hand.pop(delivery.handle, None)
        delay = min(LONGEST_DELAY, int(seconds + 0.5))
        with self._letting_go():
            await self._for_each("change_message_visibility_batch", [delivery.handle], VisibilityTimeout=delay)

    async def close(self) -> None:
        await self._keeping.stop(timeout=0)
        unfinished, self._in_hand = list(self._in_hand), {}
        with contextlib.suppress(BrokerUnavailable):  # then they come again after their visibility timeout
            await self._for_each("change_message_visibility_batch", unfinished, VisibilityTimeout=0)
        self._client.close()

    @contextlib.contextmanager
    def _letting_go(self) -> Iterator[None]:
        """After an error, the caller has let go of all that it had. It comes again after its visibility timeout."""
        try:
            yield
        except BrokerUnavailable:
            self._in_hand = {}
            raise

    def _delivery(self, found: dict[str, Any]) -> Delivery:
        headers, data = decode(found["Body"], found.get("MessageAttributes", {}))
        starts = int(found.get("Attributes", {}).get("ApproximateReceiveCount", 1))
        return Delivery(read_message(headers, data, self._queue), starts, found["ReceiptHandle"])

    async def _keep_alive(self) -> None:
        """Renew the visibility timeout of what is being handled, however long a handler takes."""
        while True:
            await asyncio.sleep(self._visibility / 3)
            with contextlib.suppress(BrokerUnavailable):
                more = {"VisibilityTimeout": self._visibility}
                await self._for_each("change_message_visibility_batch", list(self._in_hand), **more)

    async def _for_each(self, action: str, handles: Sequence[str], **more: Any) -> dict[str, str]:
        """Make a call for each ten of the messages, and return why some failed."""
        failed: dict[str, str] = {}
        for start in range(0, len(handles), AT_ONCE):
            some = handles[start : start + AT_ONCE]
            entries = [{"Id": str(at), "ReceiptHandle": handle, **more} for at, handle in enumerate(some)]
            reply = await self._call(action, Entries=entries)
            for entry in reply.get("Failed", ()):
                failed[some[int(entry["Id"])]] = f"{entry.get('Code')}: {entry.get('Message')}"
        return failed

    async def _call(self, action: str, **parameters: Any) -> dict[str, Any]:
        try:
            return await self._client.call(action, QueueUrl=await self._urls.find(self._queue), **parameters)
        except aws_errors() as error:
            self._urls.forget(self._queue)
            raise BrokerUnavailable(f"SQS did not answer: {str(error)[:300]}") from error
