"""SQS and SNS, against moto's server, and in part against ElasticMQ."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from urllib.parse import quote
from uuid import uuid4

import boto3
import botocore.session
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semel.core.messaging.messages import Message, attributes
from semel.errors import BrokerUnavailable, ConfigurationError
from semel.messaging.brokers import aws
from semel.messaging.brokers.aws import AWSClient, decode, encode, result_of
from semel.messaging.brokers.sns import SNSBroker
from semel.messaging.brokers.sqs import SQSBroker, SQSSource
from semel.messaging.brokers.urls import open_broker, open_source
from semel.messaging.ports import BrokerDown, Delivery, Refused, Sent, TryAgain
from semel.testing.brokers import BrokerSuite, SourceSuite
from tests.servers import ElasticMQServer, MotoServer

REGION = "eu-central-1"


def client(service: str, endpoint: str) -> Any:
    return boto3.client(service, region_name=REGION, endpoint_url=endpoint)


def create_queue(endpoint: str, fifo: bool) -> str:
    name = f"q-{uuid4().hex[:12]}" + (".fifo" if fifo else "")
    sqs = client("sqs", endpoint)
    sqs.create_queue(QueueName=name, Attributes={"FifoQueue": "true"} if fifo else {})
    sqs.close()
    return name


class OnSQS:
    """ElasticMQ is the quicker one, and its FIFO queues are close to those of AWS."""

    fifo = True

    @pytest.fixture
    def endpoint(self, elasticmq: ElasticMQServer) -> str:
        return elasticmq.url

    @pytest.fixture
    def queue(self, endpoint: str) -> str:
        return create_queue(endpoint, self.fifo)

    @pytest.fixture
    def open_broker(self, endpoint: str, queue: str) -> Callable[[], SQSBroker]:
        return lambda: SQSBroker(REGION, queue=queue, endpoint=endpoint)

    @pytest.fixture
    def open_source(self, endpoint: str, queue: str) -> Callable[[], SQSSource]:
        return lambda: SQSSource(REGION, queue=queue, endpoint=endpoint)


class TestFIFOBroker(OnSQS, BrokerSuite):
    pass


class TestFIFOSource(OnSQS, SourceSuite):
    pass


class OnMoto(OnSQS):
    @pytest.fixture
    def endpoint(self, moto: MotoServer) -> str:
        return moto.url


class TestStandardBroker(OnMoto, BrokerSuite):
    fifo = False
    test_the_order_of_each_stream_is_kept = None  # type: ignore[assignment]  # there is none, and it takes long
    test_calls_at_the_same_time_do_not_mix = None  # type: ignore[assignment]  # moto answers one call at a time


class TestStandardSource(OnMoto, SourceSuite):
    fifo = False


class TestSNS(OnMoto, BrokerSuite):
    test_the_order_of_each_stream_is_kept = None  # type: ignore[assignment]  # 400 calls
    test_calls_at_the_same_time_do_not_mix = None  # type: ignore[assignment]

    @pytest.fixture
    def topic(self, endpoint: str, queue: str) -> str:
        sns, sqs = client("sns", endpoint), client("sqs", endpoint)
        topic = sns.create_topic(Name=queue, Attributes={"FifoTopic": "true"})["TopicArn"]
        url = sqs.get_queue_url(QueueName=queue)["QueueUrl"]
        arn = sqs.get_queue_attributes(QueueUrl=url, AttributeNames=["QueueArn"])["Attributes"]["QueueArn"]
        sns.subscribe(TopicArn=topic, Protocol="sqs", Endpoint=arn, Attributes={"RawMessageDelivery": "true"})
        sns.close()
        sqs.close()
        return str(topic)

    @pytest.fixture
    def open_broker(self, endpoint: str, topic: str) -> Callable[[], Any]:
        return lambda: SNSBroker(REGION, topic=topic, endpoint=endpoint)

    def test_a_topic_is_found_by_its_name_and_a_missing_one_is_refused(self, endpoint: str, topic: str) -> None:
        async def main() -> None:
            broker = open_broker(f"sns://{REGION}/{topic.rpartition(':')[2]}?endpoint={quote(endpoint)}")
            missing = f"{topic.rpartition(':')[0]}:nowhere.fifo"
            batch = [message("a", 1), message(destination="nowhere.fifo"), message(destination=missing)]
            results = await broker.publish(batch, soon())
            assert [type(result) for result in results] == [Sent, Refused, Refused], results
            await broker.close()

        asyncio.run(main())


def message(stream: str = "", sequence: int = 0, **fields: object) -> Message:
    return Message(**{"id": uuid4().hex, "type": "t", "data": b"{}", "stream": stream, "sequence": sequence, **fields})  # type: ignore[arg-type]


def soon() -> float:
    return time.monotonic() + 20


async def receive(source: SQSSource, count: int) -> list[Delivery]:
    found: list[Delivery] = []
    async with asyncio.timeout(30):
        while len(found) < count:
            found += await source.receive(count - len(found), 1)
    return found


class TestFIFO(OnSQS):
    def test_a_repeat_is_dropped_but_not_a_redrive(self, endpoint: str, queue: str) -> None:
        async def main() -> None:
            broker = SQSBroker.from_url(f"sqs://{REGION}/{queue}?endpoint={quote(endpoint)}")
            sent = message("Zürich ☃", 1)  # a group cannot have this name
            for each in (sent, sent, replace(sent, redrives=1)):
                assert await broker.publish([each], soon()) == [Sent()]
            await broker.close()
            source = open_source(f"sqs://{REGION}/{queue}?endpoint={quote(endpoint)}&visibility=20s")
            assert isinstance(source, SQSSource)
            found = await receive(source, 2)
            assert [each.message.id for each in found] == [sent.id] * 2
            assert list(await source.receive(10, 0.1)) == []
            await source.acknowledge(found)
            await source.close()

        asyncio.run(main())

    def test_the_rest_of_a_stream_waits_for_a_message_under_way_and_its_time_is_renewed(
        self, endpoint: str, queue: str
    ) -> None:
        async def main() -> None:
            broker = SQSBroker(REGION, queue=queue, endpoint=endpoint)
            for sequence in (1, 2):
                assert await broker.publish([message("a", sequence)], soon()) == [Sent()]
            first, second = (SQSSource(REGION, queue=queue, endpoint=endpoint, visibility=2) for _ in range(2))
            (one,) = await receive(first, 1)
            assert list(await second.receive(10, 3)) == []  # longer than the visibility: the first one is alive
            await first.close()
            found = await receive(second, 2)
            assert [each.message.sequence for each in found] == [1, 2]
            assert found[0].starts == one.starts + 1
            await second.acknowledge(found)
            await second.close()
            await broker.close()

        asyncio.run(main())

    def test_a_renewal_that_fails_is_tried_again(self, endpoint: str, queue: str) -> None:
        async def main() -> None:
            broker = SQSBroker(REGION, queue=queue, endpoint=endpoint)
            assert await broker.publish([message("a")], soon()) == [Sent()]
            first, second = (SQSSource(REGION, queue=queue, endpoint=endpoint, visibility=3) for _ in range(2))
            held = await receive(first, 1)
            client, first._client = first._client, AWSClient("sqs", REGION, "http://127.0.0.1:1", 1, 1)
            until = time.monotonic() + 20
            while first._urls._known:  # the URL of the queue is forgotten after an error
                assert time.monotonic() < until
                await asyncio.sleep(0.01)
            first._client = client
            assert list(await second.receive(10, 4)) == []  # longer than the visibility: the first one is alive
            await first.acknowledge(held)
            for source in (first, second):
                await source.close()
            await broker.close()

        asyncio.run(main())

    def test_after_an_error_all_that_is_not_acknowledged_comes_again(self, endpoint: str, queue: str) -> None:
        async def main() -> None:
            broker = SQSBroker(REGION, queue=queue, endpoint=endpoint)
            assert await broker.publish([message("a"), message("b")], soon()) == [Sent()] * 2
            source = SQSSource(REGION, queue=queue, endpoint=endpoint, visibility=1)
            held = await receive(source, 2)
            client, source._client = source._client, AWSClient("sqs", REGION, "http://127.0.0.1:1", 1, 1)
            with pytest.raises(BrokerUnavailable):
                await source.acknowledge(held[:1])
            source._client = client
            again = await receive(source, 2)
            assert {each.message.id for each in again} == {each.message.id for each in held}
            await source.acknowledge(again)
            await source.close()
            await broker.close()

        asyncio.run(main())

    def test_a_queue_that_does_not_exist_or_is_of_the_other_kind_is_refused(self, endpoint: str, queue: str) -> None:
        async def main() -> None:
            broker = SQSBroker(REGION, queue=queue, endpoint=endpoint)
            batch = [message(destination="nowhere.fifo"), message(destination="standard"), message()]
            results = await broker.publish(batch, soon())
            assert [type(result) for result in results] == [Refused, Refused, Sent], results
            nowhere = SQSSource(REGION, queue="nowhere", endpoint=endpoint)
            with pytest.raises(BrokerUnavailable):
                await nowhere.receive(1, 0)
            await nowhere.close()
            await broker.close()

        asyncio.run(main())


@pytest.mark.slow
def test_a_service_that_does_not_answer_is_down() -> None:
    async def main() -> None:
        endpoint = "http://127.0.0.1:1"
        for broker in (
            SQSBroker(REGION, queue="q", endpoint=endpoint),
            SNSBroker(REGION, topic="t", endpoint=endpoint),
        ):
            (result,) = await broker.publish([message()], soon())
            assert isinstance(result, BrokerDown), result
            await broker.close()
        source = SQSSource(REGION, queue="q", endpoint=endpoint)
        with pytest.raises(BrokerUnavailable):
            await source.receive(1, 0.1)
        await source.close()

    asyncio.run(main())


def test_without_credentials_it_is_down(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nowhere")
    monkeypatch.setattr(
        aws, "_session", botocore.session.get_session
    )  # the session of the process may know some already

    async def main() -> None:
        broker = SQSBroker(REGION, queue="q", endpoint="http://127.0.0.1:1")
        (result,) = await broker.publish([message()], soon())
        assert isinstance(result, BrokerDown), result
        assert "credentials" in result.reason
        await broker.close()

    asyncio.run(main())


@pytest.mark.parametrize("code", ["ThrottlingException", "AccessDenied", "InternalError", "KmsDisabled"])
def test_what_may_pass_is_tried_again(code: str) -> None:
    from botocore.exceptions import ClientError

    assert isinstance(result_of(ClientError({"Error": {"Code": code, "Message": "m"}}, "SendMessageBatch")), TryAgain)


@pytest.mark.slow
@settings(max_examples=50)
@given(
    data=st.binary() | st.text().map(str.encode),
    headers=st.dictionaries(st.from_regex("[a-z][a-z0-9-]{0,9}", fullmatch=True), st.text("aé☃'\"\\ 𝄞"), max_size=20),
)
def test_any_message_has_ten_attributes_and_reads_as_it_was(data: bytes, headers: dict[str, str]) -> None:
    headers = {name: text for name, text in headers.items() if not name.startswith("ce-") and name != "content-type"}
    sent = message("s", 1, data=data, headers=headers, subject="x", source="/y", time=1.5e9)
    body, found = encode(sent)
    assert body
    assert len(found) <= 10
    assert not re.search("[\x00-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff]", body)
    names, read = decode(body, found)
    assert read == data
    assert names == attributes(sent)


def test_a_message_of_another_producer_is_text_with_attributes() -> None:
    found = {"colour": {"DataType": "String", "StringValue": "red"}, "raw": {"DataType": "Binary", "BinaryValue": b"1"}}
    assert decode("hello", found) == ({"colour": "red"}, b"hello")
    assert decode("hello", {"semel": {"DataType": "String", "StringValue": "[]"}}) == ({}, b"hello")


@pytest.mark.parametrize(
    "url", ["sqs:///queue", "sqs://eu-central-1/", "sqs://me:secret@eu-central-1/q", "sqs://eu-central-1/q?unknown=1"]
)
def test_a_url_names_region_and_queue(url: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        open_source(url)
    assert "secret" not in str(caught.value)
