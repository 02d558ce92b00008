"""What a message of the outbox is made of: its data as bytes, its id, and headers that say where it comes from.

This module makes messages. It knows no database: a unit of work adds them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any, Final

from semel.core.encoding.canonical import canonical_json
from semel.core.keys import derive, format_uuid
from semel.core.messaging.messages import Message, NewMessage, check_message
from semel.core.policy import Duration, seconds
from semel.engine.operation.handle import OperationHandle, running
from semel.engine.operation.propagation import METADATA, current_origin
from semel.errors import ConfigurationError, DocumentError
from semel.observe import events

_TEXT: Final = "text/plain; charset=utf-8"


def make_message(
    type: str,
    data: Any,
    op: OperationHandle | None = None,
    *,
    stream: str | None,
    id: str | None,
    dedup: str | None,
    destination: str,
    subject: str,
    source: str,
    content_type: str | None,
    delay: Duration | None,
    headers: Mapping[str, str] | None,
) -> NewMessage:
    """Return a message, checked. See ``Outbox.add`` for the parameters.

    :param op: the operation that it comes from; by default the one that is running.
    """
    if id is not None and dedup is not None:
        raise ConfigurationError("id= and dedup= both say which message it is: give one of them")
    if stream and delay is not None:
        raise ConfigurationError(
            "a message of a stream cannot be delayed: the stream is sent in order, so all that follow would wait for it"
        )
    body, usual = _encode(data)
    origin = current_origin(op)
    fresh = False
    if dedup is not None:
        id = derive(blake2b(source.encode(), digest_size=16, person=b"semel.message.1").digest(), f"{type}\n{dedup}")
    elif id is None:
        fresh = origin is None
        id = _uuid7() if origin is None else origin.next_id(f"{type}\n{stream or ''}")
    all_headers = {} if origin is None else {METADATA: id, **origin.headers}
    if headers:
        all_headers |= {name.lower(): text for name, text in headers.items()}
    message = NewMessage(
        id, type, body, source, destination, stream or "", 0, subject, content_type or usual, 0.0, all_headers, 0,
        0.0 if delay is None else float(seconds(delay, "delay")), fresh,
    )  # fmt: skip
    check_message(message)
    return message


def tell_emitted(message: Message, op: OperationHandle | None = None, hook: events.EventHook | None = None) -> None:
    """Tell the hooks of the operation, by default the one that is running, that it has added this message.

    :param hook: is called instead if there is no operation, or if the operation has no hook.
    """
    op = op or running.get()
    if op is not None and op._call.hook is not None:
        op._call.tell(events.Emitted, message.id, message.destination, message.stream, message.type)
    elif hook is not None:
        details = (message.id, message.destination, message.stream, message.type)
        hook(events.Emitted(message.type, "", message.id, *details, route=message.type))


def unit_for_messages(op: OperationHandle) -> Any:
    """Return the unit of work in whose transaction the operation emits."""
    if op._transaction is None and op._call.accept is not None:
        raise ConfigurationError(
            f"{op._call}: on DynamoDB a message is written with the completion: op.write(put_message(table, …)), with "
            "put_message of semel.messaging.dynamodb"
        )
    if op._transaction is None:
        raise ConfigurationError(
            f"{op._call}: op.emit() adds a message in the operation's transaction, and there is none. Run the "
            "operation in one: guard.run_in_transaction, or connection= of a route or a step; or add the message in a "
            "transaction of your own: Outbox(store).add(connection, …)"
        )
    return op._transaction


def _encode(data: Any) -> tuple[bytes, str]:
    """The data as bytes, and its usual content type."""
    if isinstance(data, (bytes, bytearray, memoryview)):
        return bytes(data), "application/octet-stream"
    try:
        if isinstance(data, str):
            return data.encode(), _TEXT
        return canonical_json(data), "application/json"
    except (DocumentError, UnicodeError) as error:
        raise ConfigurationError(
            f"the data of a message is bytes, text, or what JSON can hold: {error}. Convert it first"
        ) from error


def _uuid7() -> str:
    """A UUID of version 7: it begins with the time, so an index of such ids grows at its end."""
    return format_uuid(f"{time.time_ns() // 1_000_000:012x}{os.urandom(10).hex()}", 7)
