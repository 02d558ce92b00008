"""What the two transports share: httpx's exceptions and responses in the words of ``client/flow.py``."""

from __future__ import annotations

from typing import Final

from semel.client.flow import Answer, Intent, Lost, Reply, lost
from semel.errors import MissingDependency, NoAnswer

try:
    import httpx
except ImportError as error:
    raise MissingDependency("httpx", "httpx") from error

NOT_SENT: Final = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, httpx.ProxyError)
MISTAKES: Final = (httpx.UnsupportedProtocol, httpx.LocalProtocolError)


class HTTPXNoAnswer(NoAnswer, httpx.TransportError):
    """A NoAnswer that ``except httpx.TransportError`` catches too."""


def lost_attempt(intent: Intent, error: httpx.TransportError) -> Lost:
    """Return the attempt that ended with this error."""
    if isinstance(error, httpx.LocalProtocolError) and not _is_of_h11(error):
        # With HTTP/2, httpcore raises it also for what the server sends, after the whole request was sent.
        return Lost(error, sent=True)
    return lost(intent, error, NOT_SENT, MISTAKES)


def _is_of_h11(error: Exception) -> bool:
    """Whether HTTP/1.1 refuses the request, of which nothing was sent."""
    inner = error.__cause__  # httpcore's, which is made of the error itself
    return inner is not None and any(type(each).__module__.partition(".")[0] == "h11" for each in inner.args)


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
