"""Amazon SNS, by boto3, to publish only. Needs ``semel[sqs]``.

Subscribe queues with raw message delivery, so that ``SQSSource`` reads what arrives. A FIFO topic keeps the order of
every stream in the FIFO queues that subscribe to it. ``aws.py`` says how a message looks there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

from semel.core.policy import Duration
from semel.messaging.brokers.aws import (
    CONNECT_TIMEOUT,
    LARGEST,
    TIMEOUT,
    AWSBroker,
    UnknownDestination,
    read_aws_url,
)
from semel.messaging.brokers.options import flag, number


class SNSBroker(AWSBroker):
    """Publishes to topics of SNS. They must exist. boto3 finds the credentials of the process."""

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
        :param endpoint: the URL of a server to use instead of AWS.
        :param largest: the most bytes that a message may have.
        :param timeout: how long the service may take for one call.
        :param connect_timeout: how long it may take to connect.
        """
        super().__init__(
            "sns", "Message", self._send_entries, region, topic, fifo, endpoint, largest, timeout, connect_timeout
        )
        self._arns: dict[str, str] = {}

    @classmethod
    def from_url(cls, url: str) -> Self:
        """Open ``sns://region/topic.fifo``; options: ``endpoint``, ``fifo``, ``largest``."""
        region, topic, options = read_aws_url(url, {"fifo": flag, "largest": number})
        return cls(region, topic=topic, **options)

    async def _send_entries(self, where: str, entries: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        arn = await self._arn(where)
        return await self._client.call("publish_batch", TopicArn=arn, PublishBatchRequestEntries=entries)

    async def _arn(self, topic: str) -> str:
        if topic.startswith("arn:"):
            return topic
        token: dict[str, str] = {}
        while topic not in self._arns:
            page = await self._client.call("list_topics", **token)
            self._arns |= {each["TopicArn"].rpartition(":")[2]: each["TopicArn"] for each in page["Topics"]}
            if not page.get("NextToken"):
                break
            token = {"NextToken": page["NextToken"]}
        if topic not in self._arns:
            raise UnknownDestination(f"there is no topic {topic!r}: create it, or correct the destination")
        return self._arns[topic]
