"""What the two transports share: httpx's exceptions and responses in the words of ``client/flow.py``."""

from __future__ import annotations

from typing import Final

from semel.client.flow import Answer, Lost, Reply
from semel.errors import MissingDependency, NoAnswer

try:
    import httpx
except ImportError as error:
    raise MissingDependency("httpx", "httpx") from error

NOT_SENT: Final = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, httpx.ProxyError)
MISTAKES: Final = (httpx.UnsupportedProtocol, httpx.LocalProtocolError)


class HTTPXNoAnswer(NoAnswer, httpx.TransportError):
    """A NoAnswer that ``except httpx.TransportError`` catches too."""


def answer(response: httpx.Response, content: bytes) -> Reply:
    """Give the response a stream with the bytes that were read, so that httpx finds it as it came."""
    decoded = content
    if "Content-Encoding" in response.headers:
        try:
            decoded = httpx.Response(200, headers=response.headers, content=content).content
        except httpx.DecodingError as error:  # httpx would find out when the outcome is settled
            return Lost(error, sent=True)
    response.stream = httpx.ByteStream(content)
    return Answer(response.status_code, response.headers, lambda: decoded, response)
