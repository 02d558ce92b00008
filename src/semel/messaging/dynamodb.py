"""Messages on DynamoDB: items of a table of your own, written in one transaction with the operation's completion.

::

    op.write(put_message("events", "order.placed", {"order": 7}, stream="order-7"))

There is no outbox and no relay here: the stream of the table (DynamoDB Streams) delivers each new item, to a Lambda
function or a pipe of EventBridge. The key of the table is ``stream`` and ``id``, both text.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any, Final

from semel.core.messaging.messages import Message
from semel.core.policy import Duration, seconds
from semel.engine.operation.emitting import make_message

__all__ = ["put_message", "read_item"]

_TEXTS: Final = ("type", "source", "destination", "subject", "content_type")


def put_message(
    table: str,
    type: str,
    data: Any,
    *,
    stream: str | None = None,
    id: str | None = None,
    dedup: str | None = None,
    destination: str = "",
    subject: str = "",
    source: str = "",
    content_type: str | None = None,
    headers: Mapping[str, str] | None = None,
    keep: Duration = "7d",
) -> dict[str, Any]:
    """Return a message as an element for ``op.write``. The other parameters are the same as for ``Outbox.add``.

    :param table: the table of messages. Its time to live is by the attribute ``ttl``.
    :param stream: the partition key, so that DynamoDB Streams keep the order. Without it, the id takes its place.
    :param keep: how long the item stays in the table.
    """
    message = make_message(
        type, data, stream=stream, id=id, dedup=dedup, destination=destination, subject=subject, source=source,
        content_type=content_type, delay=None, headers=headers,
    )  # fmt: skip
    now = time.time()
    item: dict[str, dict[str, Any]] = {
        "stream": {"S": message.stream or message.id},
        "id": {"S": message.id},
        "data": {"B": message.data},
        "headers": {"S": json.dumps(dict(message.headers))},
        "ordered": {"BOOL": bool(message.stream)},
        "created": {"N": f"{now:.6f}"},
        "ttl": {"N": str(round(now + seconds(keep, "keep")))},
    }
    texts = {name: getattr(message, name) for name in _TEXTS}
    return {"Put": {"TableName": table, "Item": item | {name: {"S": text} for name, text in texts.items() if text}}}


def read_item(item: Mapping[str, Mapping[str, Any]]) -> Message:
    """Return the message of an item, as boto3 or an event of DynamoDB Streams (``NewImage``) shows it.

    Decode ``data`` first if it comes as base64, as in the event of a Lambda function.
    """
    texts = {name: item[name]["S"] for name in ("id", *_TEXTS) if name in item}
    return Message(
        data=bytes(item["data"]["B"]),
        stream=item["stream"]["S"] if item["ordered"]["BOOL"] else "",
        time=float(item["created"]["N"]),
        headers=json.loads(item["headers"]["S"]),
        **texts,
    )
