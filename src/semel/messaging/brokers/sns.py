"""Amazon SNS, by boto3, to publish only. Needs ``semel[sqs]``.

Subscribe queues with raw message delivery, so that ``SQSSource`` reads what arrives. A FIFO topic keeps the order of
every stream in the FIFO queues that subscribe to it. ``aws.py`` says how a message looks there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Self

from semel.core.messaging.messages import Message
from semel.core.policy import Duration, seconds
from semel.messaging.brokers.aws import (
    DEDUP_WINDOW,
    LARGEST,
    AWSClient,
    encode,
    fifo_fields,
    publish_in_batches,
    read_aws_url,
    refuses,
    results_of_batch,
)
from semel.messaging.brokers.options import flag, number
from semel.messaging.ports import Capabilities, Refused, Result

TIMEOUT: Final = 10.0
CONNECT_TIMEOUT: Final = 3.0


class SNSBroker:
    """Publishes to topics of SNS. They must exist. The credentials are those of the process, as boto3 finds them."""

    def __init__(
        self,
        region: str,
        *,
        topic: str = "",
        fifo: bool | None = None,
        endpoint: str | None = None,
        largest: int = LARGEST,
        timeout: Duration = TIMEOUT,
        connect_timeout: Duration = CONNECT_TIMEOUT,
    ) -> None:
        """
        :param topic: the name or the ARN of the topic for messages without a destination. A destination is one, too.
        :param fifo: whether the topics are FIFO topics. Defaults to what the name of the topic says.
        :param endpoint: the URL of another server than that of AWS.
        :param largest: the most bytes that a message may have.
        :param timeout: how long the service may take for one call.
        :param connect_timeout: how long it may take to connect.
        """
        limits = (seconds(timeout, "timeout"), seconds(connect_timeout, "connect_timeout"))
        self._client = AWSClient("sns", region, endpoint, *limits)
        self._topic = topic
        self._fifo = topic.endswith(".fifo") if fifo is None else fifo
        self._arns: dict[str, str] = {}
        self.capabilities = Capabilities(
            name="Amazon SNS",
            ordered=self._fifo,
            pipelines=False,  # of a batch, one message may fail and a later one of its group succeed
            largest=largest,
            dedup_window=DEDUP_WINDOW if self._fifo else 0.0,
        )

    @classmethod
    def from_url(cls, url: str) -> Self:
        """Open ``sns://region/topic.fifo``; options: ``endpoint``, ``fifo``, ``largest``."""
        region, topic, options = read_aws_url(url, {"fifo": flag, "largest": number})
        return cls(region, topic=topic, **options)

    async def publish(self, messages: Sequence[Message], deadline: float) -> Sequence[Result]:
        return await publish_in_batches(messages, deadline, self._topic, self._refuses, self._send)

    async def close(self) -> None:
        self._client.close()

    def _refuses(self, message: Message, topic: str) -> Refused | None:
        return refuses(message, topic, self.capabilities.largest, self._fifo)

    async def _send(self, topic: str, messages: Sequence[Message]) -> Sequence[Result]:
        entries = []
        for at, message in enumerate(messages):
            body, found = encode(message)
            more = fifo_fields(message) if self._fifo else {}
            entries.append({"Id": str(at), "Message": body, "MessageAttributes": found, **more})
        arn = await self._arn(topic)
        if arn is None:
            return [Refused(f"there is no topic {topic!r}: create it, or correct the destination")] * len(messages)
        reply = await self._client.call("publish_batch", TopicArn=arn, PublishBatchRequestEntries=entries)
        return results_of_batch(reply, len(messages))

    async def _arn(self, topic: str) -> str | None:
        if topic.startswith("arn:"):
            return topic
        token: dict[str, str] = {}
        while topic not in self._arns:
            page = await self._client.call("list_topics", **token)
            self._arns |= {each["TopicArn"].rpartition(":")[2]: each["TopicArn"] for each in page["Topics"]}
            if not page.get("NextToken"):
                break
            token = {"NextToken": page["NextToken"]}
        return self._arns.get(topic)
