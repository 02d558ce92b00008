"""A record and its stored outcome as plain values, for people and for JSON."""

from __future__ import annotations

import json
from typing import Any

from semel.codec import Codec
from semel.core.encoding.plain import PLAIN
from semel.core.encoding.serializers import decode_result
from semel.core.encoding.snapshot import Kind, decode_response
from semel.core.ops import Record
from semel.core.states import State
from semel.errors import SemelError


def describe_record(record: Record | None, codec: Codec) -> dict[str, Any]:
    """A record as plain values. Times are seconds from now. Fields that mean nothing in its state are left out."""
    if record is None:
        return {"state": State.ABSENT.name.lower()}
    shown: dict[str, Any] = {
        "state": record.state.name.lower(),
        "id": record.id.hex(),
        "attempt": record.attempt,
        "token": record.token,
        "age": round(record.age, 3),
    }
    if record.root is not None:  # as the caller named them
        shown["root"] = record.root
        shown["parent"] = record.parent
    if record.state is State.RUNNING:
        shown["lease_left"] = round(record.lease_left, 3)
    if record.state is State.DONE:
        shown["expires_in"] = round(record.expires_in, 3)
        shown.update(describe_outcome(record, codec))
    return shown


def describe_outcome(record: Record, codec: Codec) -> dict[str, Any]:
    """What is stored: a response, a result, a failure, or why there is none."""
    try:
        snapshot = codec.open(record.snapshot or b"", record.id)
        if snapshot.kind is Kind.EMPTY:
            return {"not_kept": snapshot.reason}
        if snapshot.kind is Kind.RESPONSE:
            status, headers, body, omitted = decode_response(snapshot.payload)
            lines = [[name.decode("latin-1"), value.decode("latin-1")] for name, value in headers]
            return {"response": {"status": status, "headers": lines, "body": None if omitted else _text(body)}}
        if snapshot.kind is Kind.VALUE:
            try:
                return {"result": decode_result(PLAIN, snapshot.serializer, snapshot.payload)}
            except SemelError:
                pass  # only the program knows this type: show the stored form
        name = "failure" if snapshot.kind is Kind.ERROR else "result"
        return {name: _as_stored(snapshot.payload)}
    except SemelError as error:
        return {"unreadable": str(error)}


def _as_stored(payload: bytes) -> Any:
    try:
        return json.loads(payload)
    except ValueError:
        return repr(payload)


def _text(body: bytes) -> str:
    try:
        return body.decode()
    except UnicodeDecodeError:
        return repr(body)
