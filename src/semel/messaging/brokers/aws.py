"""What SQS and SNS have in common: calls by boto3, in threads; their errors; and the form of a message.

A message has at most ten attributes there, and its body is text that is not empty. So the attributes ``ce-…`` and
``content-type`` are attributes, and one more, ``semel``, is a JSON object: ``headers`` has the other headers, ``data``
says whether the body is the data as ``text``, or in ``base64``, or stands for data that is ``empty``.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import json
import re
import threading
from base64 import b64decode, b64encode
from collections.abc import Awaitable, Callable, Mapping, Sequence
from time import monotonic
from typing import Any, Final

from semel.core.messaging.messages import Message, attributes, size_of
from semel.core.policy import Duration, seconds
from semel.errors import ConfigurationError
from semel.messaging.brokers.options import read_url
from semel.messaging.brokers.sending import LATE
from semel.messaging.ports import BrokerDown, Capabilities, Refused, Result, Sent, TryAgain
from semel.stores.settings import require

LARGEST: Final = 190_000
"""A message and a batch may have 256 KiB each. In base64, data that is no text grows by a third."""
AT_ONCE: Final = 10
"""The most messages of a batch."""
MOST_BYTES: Final = 256 * 1024
CALLS: Final = 8
"""How many calls one ``publish`` makes at the same time."""
TIMEOUT: Final = 10.0
CONNECT_TIMEOUT: Final = 3.0
DEDUP_WINDOW: Final = 300.0
"""Of FIFO queues and topics."""
_REST: Final = "semel"
_NO_TEXT: Final = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff]")
_ID: Final = re.compile(r"[A-Za-z0-9!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]{1,128}")
_MISSING: Final = frozenset({
    "AWS.SimpleQueueService.NonExistentQueue", "QueueDoesNotExist", "NotFound", "NotFoundException",
})  # fmt: skip
_UNFIT: Final = frozenset({
    "InvalidMessageContents", "InvalidParameterValue", "InvalidAttributeValue", "InvalidParameter",
    "ParameterValueInvalid", "UnsupportedOperation",
})  # fmt: skip
_UNKNOWN_CALLER: Final = frozenset({
    "InvalidClientTokenId", "UnrecognizedClientException", "SignatureDoesNotMatch", "ExpiredToken",
    "ExpiredTokenException", "MissingAuthenticationToken", "IncompleteSignature", "InvalidAccessKeyId", "OptInRequired",
})  # fmt: skip
_client_lock: Final = threading.Lock()
"""Many threads may use a client, but only one at a time may create one."""


@functools.cache
def _session() -> Any:
    """Return the session of the process: it holds the credentials and the slow-to-read models of the services."""
    return require("botocore.session", "sqs", "boto3").get_session()


class AWSClient:
    """A client of one service. Its calls run in threads; each takes ``timeout`` seconds at most."""

    def __init__(self, service: str, region: str, endpoint: str | None, timeout: float, connect_timeout: float) -> None:
        if not region:
            raise ConfigurationError(
                f"the URL of a broker at AWS names the region first: {service}://eu-central-1/name"
            )
        config = require("botocore.config", "sqs", "boto3").Config(
            connect_timeout=connect_timeout,
            read_timeout=timeout,
            max_pool_connections=2 * CALLS,
            retries={"total_max_attempts": 1},  # the relay retries, and keeps the order
            user_agent_extra="semel",
        )
        try:
            with _client_lock:
                create = _session().create_client
                self._client = create(service, region_name=region, endpoint_url=endpoint, config=config)
        except ValueError:  # InvalidRegionError is one, too
            raise ConfigurationError(
                f"the region or the endpoint is not valid: {service}://eu-central-1/name?endpoint=http://host:port"
            ) from None

    async def call(self, action: str, **parameters: Any) -> dict[str, Any]:
        """Make one call. Raises the errors of botocore: see ``result_of``."""
        reply: dict[str, Any] = await asyncio.to_thread(getattr(self._client, action), **parameters)
        return reply

    def close(self) -> None:
        """Close the idle connections. The client opens others when it is called again."""
        self._client.close()


def aws_errors() -> tuple[type[Exception], ...]:
    """Return the classes of errors that a call raises."""
    from botocore.exceptions import BotoCoreError, ClientError

    return BotoCoreError, ClientError


def result_of(error: Exception) -> Result:
    """Return what an error of a call means for its messages."""
    from botocore import exceptions as known

    reason = str(error)[:300]
    if isinstance(error, known.ClientError):
        code = error.response.get("Error", {}).get("Code", "")
        if code in _MISSING or code in _UNFIT:
            return Refused(reason)
        return BrokerDown(reason) if code in _UNKNOWN_CALLER else TryAgain(reason)
    if isinstance(error, (known.ReadTimeoutError, known.ConnectionClosedError)):
        return TryAgain(reason)
    return BrokerDown(reason)


class UnknownDestination(Exception):
    """There is no queue or topic of this name."""


class AWSBroker:
    """What publishing to SQS and to SNS have in common: calls with ten messages each, several at the same time."""

    def __init__(
        self,
        service: str,
        body: str,
        send: Callable[[str, Sequence[Mapping[str, Any]]], Awaitable[Mapping[str, Any]]],
        region: str,
        default: str,
        fifo: bool | None,
        endpoint: str | None,
        largest: int,
        timeout: Duration,
        connect_timeout: Duration,
    ) -> None:
        """
        :param body: what an entry of a batch calls the body of a message.
        :param send: sends the entries of a batch to a queue or topic, and returns the reply. It may raise
            UnknownDestination and the errors of botocore.
        :param default: the queue or topic for messages without a destination.
        """
        limits = (seconds(timeout, "timeout"), seconds(connect_timeout, "connect_timeout"))
        self._client = AWSClient(service, region, endpoint, *limits)
        self._body = body
        self._send = send
        self._default = default
        self._fifo = default.endswith(".fifo") if fifo is None else fifo
        self.capabilities = Capabilities(
            name=f"Amazon {service.upper()}",
            ordered=self._fifo,
            pipelines=False,  # a message of a batch may fail while a later one of its group succeeds
            largest=largest,
            dedup_window=DEDUP_WINDOW if self._fifo else 0.0,
        )

    async def publish(self, messages: Sequence[Message], deadline: float) -> Sequence[Result]:
        results: dict[str, Result] = {}
        batches: list[tuple[str, list[dict[str, Any]]]] = []
        last: dict[str, tuple[list[dict[str, Any]], int]] = {}
        for at, message in enumerate(messages):
            where = message.destination or self._default
            entry, size = self._entry(str(at), message)
            if (refused := self._refuse(message, where, size)) is not None:
                results[str(at)] = refused
                continue
            batch, bytes_before = last.get(where, ([], 0))
            if not batch or len(batch) == AT_ONCE or bytes_before + size > MOST_BYTES:
                batch, bytes_before = [], 0
                batches.append((where, batch))
            batch.append(entry)
            last[where] = (batch, bytes_before + size)
        calls = asyncio.Semaphore(CALLS)

        async def send(where: str, batch: list[dict[str, Any]]) -> None:
            async with calls:
                if monotonic() < deadline:
                    results.update(await self._send_in_time(where, batch, deadline))

        await asyncio.gather(*(send(where, batch) for where, batch in batches))
        return [results.get(str(at), LATE) for at in range(len(messages))]

    async def close(self) -> None:
        self._client.close()

    async def _send_in_time(
        self, where: str, entries: Sequence[Mapping[str, Any]], deadline: float
    ) -> dict[str, Result]:
        """Send a batch, and return a result for each entry by its ``Id``."""
        reply: Mapping[str, Any] = {}
        otherwise: Result = TryAgain("AWS did not say what became of it")
        try:
            async with asyncio.timeout(deadline - monotonic()):
                reply = await self._send(where, entries)
        except TimeoutError:
            otherwise = TryAgain("AWS did not answer before the deadline")
        except UnknownDestination as unknown:
            otherwise = Refused(str(unknown))
        except aws_errors() as error:
            otherwise = result_of(error)
        results = dict.fromkeys((entry["Id"] for entry in entries), otherwise)
        for entry in reply.get("Successful", ()):
            results[entry["Id"]] = Sent()
        for entry in reply.get("Failed", ()):
            reason = f"{entry.get('Code')}: {entry.get('Message', '')}"[:300]
            results[entry["Id"]] = Refused(reason) if entry.get("Code") in _UNFIT else TryAgain(reason)
        return results

    def _entry(self, id: str, message: Message) -> tuple[dict[str, Any], int]:
        """Return the entry of a message, and how many bytes of it AWS counts."""
        body, found = encode(message)
        entry = {"Id": id, self._body: body, "MessageAttributes": found}
        if self._fifo:
            # The group keeps the order. A repeat is dropped by the id.
            entry["MessageGroupId"] = _fit(message.stream or message.id)
            entry["MessageDeduplicationId"] = _fit(message.broker_id)
        sizes = (len(name) + len("String") + len(each["StringValue"].encode()) for name, each in found.items())
        return entry, len(body.encode()) + sum(sizes)

    def _refuse(self, message: Message, where: str, wire_size: int) -> Refused | None:
        """Return why a message cannot be sent to a queue or topic, if so."""
        fifo, largest = self._fifo, self.capabilities.largest
        if not where:
            return Refused("the message has no destination, and the relay no default: put the name into its URL")
        if where.endswith(".fifo") != fifo:
            return Refused(
                f"this relay sends to {'' if fifo else 'no '}FIFO queues and topics{' only' if fifo else ''}"
            )
        if (size := size_of(attributes(message), message.data)) > largest or wire_size > MOST_BYTES:
            return Refused(f"the message is too large: it has {size} bytes, and the most is {largest}")
        return None


def _fit(text: str) -> str:
    """Return the text if it is allowed as an id there, else its hash."""
    return text if _ID.fullmatch(text) else hashlib.sha256(text.encode()).hexdigest()


def encode(message: Message) -> tuple[str, dict[str, Any]]:
    """Return the body and the attributes of a message."""
    form, body = "text", ""
    try:
        body = message.data.decode()
    except UnicodeDecodeError:
        form = "base64"
    if form == "base64" or _NO_TEXT.search(body):
        form, body = "base64", b64encode(message.data).decode()
    elif not body:
        form, body = "empty", "-"
    texts = attributes(message)
    headers = {name: texts.pop(name) for name in message.headers if name in texts}
    texts[_REST] = json.dumps({"headers": headers, "data": form}, ensure_ascii=False)
    return body, {name: {"DataType": "String", "StringValue": text} for name, text in texts.items()}


def decode(body: str, found: Mapping[str, Any]) -> tuple[dict[str, str], bytes]:
    """Return the headers and the data of a message. Those of other producers are text, with any attributes."""
    headers = {name: each["StringValue"] for name, each in found.items() if "StringValue" in each}
    try:
        rest = json.loads(headers.pop(_REST, "{}"))
        more, form = dict(rest.get("headers", {})), rest.get("data", "text")
        data = b64decode(body, validate=True) if form == "base64" else b"" if form == "empty" else body.encode()
    except (ValueError, AttributeError, TypeError):
        return headers, body.encode()
    return {**headers, **{str(name): str(text) for name, text in more.items()}}, data


def read_aws_url(url: str, known: dict[str, Callable[[str], Any]]) -> tuple[str, str, dict[str, Any]]:
    """Return region, name and options of ``sqs://region/name?endpoint=…``."""
    region, name, options = read_url(url, {**known, "endpoint": str})
    if "@" in region:
        raise ConfigurationError("this URL has no user or password: the AWS credentials of the process are used")
    return region, name, options
