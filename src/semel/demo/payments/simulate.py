"""Faults on purpose: slow handlers, dying workers, large and streamed answers; and mistakes for the verdict to find.

A client asks for a fault in ``simulate``. A mistake is chosen when the service starts, to show that the verdict would
find it.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
from collections.abc import AsyncIterator, Mapping
from typing import Any, Final

from fastapi import Response
from fastapi.responses import StreamingResponse

from semel.demo.payments.schemas import Simulation
from semel.engine.operation import AsyncOperation

__all__ = ["MISTAKES", "Fate", "NewKeys"]

MISTAKES: Final = ("unprotected", "blind", "silent")
"""Semel bypassed; a payment that does not look for its own row; an answer without a row."""
CHUNKS: Final = 8
_WITHOUT_BODY: Final = frozenset({204, 205, 304})


class Fate:
    """What happens to one call."""

    def __init__(self, wanted: Simulation | None, op: AsyncOperation, mistake: str = "") -> None:
        self._wanted = wanted or Simulation()
        # The attempt that takes over must succeed, and without Semel every attempt is a first one.
        crash = self._wanted.crash if op.attempt == 1 and mistake != "unprotected" else False
        self._crash = "after" if crash is True else crash

    async def before_the_row(self) -> None:
        await asyncio.sleep(self._wanted.delay_ms / 1000)
        if self._crash == "before":
            _die()

    def after_the_row(self) -> None:
        if self._crash == "after":
            _die()

    @property
    def refused(self) -> bool:
        """Whether the answer is an error, and nothing is done."""
        return self._wanted.status is not None and self._wanted.status >= 400

    def answer(self, content: Mapping[str, Any], status: int, headers: Mapping[str, str] | None = None) -> Response:
        """Make the answer, with the status, size and form that the client asked for."""
        status = self._wanted.status or status
        if status in _WITHOUT_BODY:
            return Response(status_code=status, headers=headers)
        body = json.dumps(content, separators=(",", ":")).encode()
        if len(body) < self._wanted.body_bytes:
            frame = len(b',"padding":""')
            padding = "." * max(0, self._wanted.body_bytes - len(body) - frame)
            body = json.dumps({**content, "padding": padding}, separators=(",", ":")).encode()
        if self._wanted.stream:
            return StreamingResponse(_chunks(body), status, headers, media_type="application/json")
        return Response(body, status, headers, media_type="application/json")


class NewKeys:
    """The mistake "unprotected": a middleware that gives every request a new key."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            kept = [line for line in scope["headers"] if line[0].lower() != b"idempotency-key"]
            scope = {**scope, "headers": [*kept, (b"idempotency-key", secrets.token_hex(8).encode())]}
        await self._app(scope, receive, send)


async def _chunks(body: bytes) -> AsyncIterator[bytes]:
    size = max(1, -(-len(body) // CHUNKS))
    for start in range(0, len(body), size):
        yield body[start : start + size]


def _die() -> None:
    """Die without clean-up, as by the kernel's out-of-memory killer."""
    os.kill(os.getpid(), signal.SIGKILL)
