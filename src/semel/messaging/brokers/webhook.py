"""Webhooks: every message is a POST request, signed as Standard Webhooks say. Needs ``semel[webhooks]``.

The headers follow CloudEvents in binary mode. ``webhook-id`` and ``Idempotency-Key`` are the id of the message,
so a receiver that keeps keys applies it once: after a retry, and after a redrive.

A URL that comes from a message is a request to wherever its author likes. So such a URL must be https, and its host
must have public addresses only, unless ``private`` is true; the request goes to the address that was checked. The
default URL is yours, and is not checked. Redirects are never followed.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import os
import re
import socket
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Sequence
from contextlib import suppress
from email.utils import parsedate_to_datetime
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address
from time import monotonic
from typing import TYPE_CHECKING, Final, Self, TypeAlias
from urllib.parse import quote, urlsplit

from semel.core.messaging.messages import Message, attributes
from semel.core.policy import Duration, seconds
from semel.errors import ConfigurationError
from semel.messaging.brokers.sending import LATE, too_large
from semel.messaging.ports import Capabilities, DestinationDown, Refused, Result, Sent, TryAgain
from semel.stores.settings import require

if TYPE_CHECKING:
    import httpx

SECRET_VARIABLE: Final = "SEMEL_WEBHOOK_SECRET"
"""The secret that signs webhooks, of a broker that is opened by its URL. It keeps the secret out of ``ps``."""
LARGEST: Final = 1 << 20
TIMEOUT: Final = 15.0
CONNECT_TIMEOUT: Final = 5.0
CONCURRENCY: Final = 20
LARGEST_BODY: Final = 64 << 10
BODY_TIMEOUT: Final = 0.5
"""How much of a response's body is read, and for how many seconds."""
LONGEST_PAUSE: Final = 24 * 3600.0
"""The longest ``Retry-After`` that is believed."""
_LATER: Final = frozenset({408, 409, 423, 425, 429})
"""Answers that mean "not now". A receiver that still works on the first try answers 409."""
_RESERVED: Final = frozenset({
    "connection", "content-length", "expect", "host", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade",
    "webhook-id", "webhook-signature", "webhook-timestamp",
})  # fmt: skip
_PLAIN: Final = re.compile("[ -~]*")
_NAT64: Final = IPv6Network("64:ff9b::/96")
"""Gateways translate these addresses to the IPv4 address in their last four bytes."""

Secrets: TypeAlias = str | Sequence[str]


class WebhookBroker:
    """Sends messages as requests. A message is sent when the receiver answers with a status of 200 to 299."""

    def __init__(
        self,
        url: str = "",
        *,
        secret: Secrets | Callable[[Message], Secrets] | None,
        private: bool = False,
        largest: int = LARGEST,
        timeout: Duration = TIMEOUT,
        connect_timeout: Duration = CONNECT_TIMEOUT,
        concurrency: int = CONCURRENCY,
        client: Callable[[], httpx.AsyncClient] | None = None,
    ) -> None:
        """
        :param url: for messages without a destination. A destination is a URL, too.
        :param secret: ``whsec_…``; several while a secret is replaced; a function if every receiver has its own; None
            to send without a signature.
        :param private: allow destinations with plain http, and in private networks.
        :param timeout: seconds that a receiver may take.
        :param connect_timeout: how long it may take to connect.
        :param largest: the most bytes that a message may have.
        :param concurrency: how many requests are under way at the same time.
        :param client: returns a client of httpx with settings of your own, such as a proxy or certificates.
        """
        self._httpx = require("httpx", "webhooks")
        self._url = url
        self._secrets = secret if callable(secret) else _constant(_checked(secret))
        self._private = private
        self._timeout = seconds(timeout, "timeout")
        self._connect_timeout = seconds(connect_timeout, "connect_timeout")
        self._concurrency = concurrency
        self._slots = asyncio.Semaphore(concurrency)
        self._make_client = client or self._httpx.AsyncClient
        self._client: httpx.AsyncClient | None = None
        self.capabilities = Capabilities(name="webhooks", ordered=True, pipelines=False, largest=largest)
        if url and (why := _malformed(url, ("https", "http"))):
            raise ConfigurationError(f"the URL of a webhook {why}")

    @classmethod
    def from_url(cls, url: str) -> Self:
        """Send to this URL. The secret is in the environment variable ``SEMEL_WEBHOOK_SECRET``."""
        secret = os.environ.get(SECRET_VARIABLE)
        if not secret:
            raise ConfigurationError(
                f"a webhook is signed: set {SECRET_VARIABLE}=whsec_… (several are separated by spaces)"
            )
        return cls(url, secret=secret.split())

    async def publish(self, messages: Sequence[Message], deadline: float) -> Sequence[Result]:
        if self._client is None:
            self._client = self._make_client()
        results = await asyncio.gather(*(self._send(message, deadline) for message in messages))
        to_default = [result for message, result in zip(messages, results, strict=True) if not message.destination]
        default_down = all(isinstance(result, DestinationDown) for result in to_default)
        for at, (message, result) in enumerate(zip(messages, results, strict=True)):
            if isinstance(result, DestinationDown) and (message.destination or not default_down):
                results[at] = TryAgain(result.reason)
        return results

    async def close(self) -> None:
        client, self._client = self._client, None
        # The next call may come from another event loop, as that of the next ``Relay.drain`` does.
        self._slots = asyncio.Semaphore(self._concurrency)
        if client is not None:
            await client.aclose()

    async def _send(self, message: Message, deadline: float) -> Result:
        async with self._slots:
            left = min(self._timeout, deadline - monotonic())
            if left <= 0:
                return LATE
            try:
                async with asyncio.timeout(left):
                    response = await self._post(message)
                return response if isinstance(response, (Refused, TryAgain)) else await self._finish(response)
            except (TimeoutError, self._httpx.ReadTimeout, self._httpx.WriteTimeout):
                return TryAgain("the receiver did not answer in time")
            except (self._httpx.ConnectError, self._httpx.ConnectTimeout, OSError) as error:
                return DestinationDown(f"the receiver cannot be reached: {str(error) or type(error).__name__}")
            except self._httpx.HTTPError as error:
                return TryAgain(f"the request failed: {str(error) or type(error).__name__}")
            except (self._httpx.InvalidURL, ValueError) as error:
                return Refused(f"the request cannot be made: {error}")

    async def _post(self, message: Message) -> httpx.Response | Refused | TryAgain:
        if refused := self._refuses(message):
            return refused
        url, extensions = self._httpx.URL(message.destination or self._url), {}
        try:
            secrets = self._secrets(message)
        except Exception as error:  # its text is not shown, because it may hold a secret
            return TryAgain(f"the function that returns the secret raised {type(error).__name__}")
        try:
            headers = _headers(message, secrets)
        except (AttributeError, TypeError, ValueError):
            return TryAgain("the function that returns the secret did not return whsec_… as text")
        if message.destination and not self._private:
            address = await _public_address(url.host, url.port or 443)
            if address is None:
                return Refused("the destination is in a private network: allow that with private=True")
            headers["host"] = url.netloc.decode("ascii")
            url, extensions = url.copy_with(host=address), {"sni_hostname": url.host}
        assert self._client is not None
        request = self._client.build_request(
            "POST", url, content=message.data, headers=headers, extensions=extensions,
            timeout=self._httpx.Timeout(self._timeout, connect=self._connect_timeout),
        )  # fmt: skip
        return await self._client.send(request, stream=True, follow_redirects=False)

    async def _finish(self, response: httpx.Response) -> Result:
        """Return what the status means. The body is only read so that the connection can be used again."""
        length = response.headers.get("content-length", "")
        try:
            if length.isdecimal() and int(length) <= LARGEST_BODY:
                with suppress(self._httpx.HTTPError, TimeoutError):
                    async with asyncio.timeout(BODY_TIMEOUT):
                        async for _ in response.aiter_raw():  # as it came: unpacked, it could fill the memory
                            pass
        finally:
            await response.aclose()
        return _result(response.status_code, response.headers.get("retry-after"))

    def _refuses(self, message: Message) -> Refused | None:
        if not message.destination and not self._url:
            return Refused("the message has no destination, and the relay no default URL")
        schemes = ("https", "http") if self._private else ("https",)
        if message.destination and (why := _malformed(message.destination, schemes)):
            return Refused(f"the destination {why}")
        if unfit := _RESERVED & message.headers.keys():
            return Refused(f"the header {min(unfit)!r} cannot be sent with a webhook")
        return too_large(message, self.capabilities.largest)


def sign(secret: str, id: str, timestamp: int, data: bytes) -> str:
    """Return the signature of Standard Webhooks: the HMAC of id, time and data."""
    key = b64decode(secret.removeprefix("whsec_"))
    signed = f"{id}.{timestamp}.".encode() + data
    return "v1," + b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode()


def _headers(message: Message, secrets: Secrets) -> dict[str, str]:
    now = int(time.time())
    headers = {name: _text(name, text) for name, text in attributes(message).items()}
    headers |= {"webhook-id": quote(message.id), "webhook-timestamp": str(now), "user-agent": "semel"}
    headers["idempotency-key"] = quote(message.id)
    each = [secrets] if isinstance(secrets, str) else secrets
    if each:
        headers["webhook-signature"] = " ".join(sign(one, quote(message.id), now, message.data) for one in each)
    return headers


def _text(name: str, text: str) -> str:
    """Return the value of a header. CloudEvents are percent-encoded, and other headers if they are not plain ASCII."""
    if name.startswith("ce-"):
        return quote(text, safe="!#$&'()*+,/:;<=>?@[\\]^`{|}~")
    return text if _PLAIN.fullmatch(text) else quote(text, safe=" ")


def _result(status: int, retry_after: str | None) -> Result:
    if 200 <= status < 300:
        return Sent()
    if 300 <= status < 400:
        return TryAgain(f"the receiver answered {status}, and redirects are not followed: correct the URL")
    if status in _LATER or status >= 500:
        return TryAgain(f"the receiver answered {status}", _pause(retry_after))
    return Refused(f"the receiver answered {status}")


def _pause(retry_after: str | None) -> float | None:
    """Return the seconds that a Retry-After header asks for."""
    try:
        if not retry_after:
            return None
        if retry_after.strip().isdecimal():
            pause = float(retry_after)
        else:
            pause = parsedate_to_datetime(retry_after).timestamp() - time.time()
    except (ValueError, OverflowError):
        return None
    return min(LONGEST_PAUSE, max(0.0, pause))


def _malformed(url: str, schemes: Sequence[str]) -> str | None:
    """Return what is wrong with a URL. It is not quoted, because it may hold a password."""
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        return "cannot be parsed"
    if parts.scheme not in schemes or not parts.hostname:
        return f"must begin with {' or '.join(f'{scheme}://' for scheme in schemes)}"
    if parts.username or parts.password:
        return "holds a user or a password, which a signature replaces"
    return None


async def _public_address(host: str, port: int) -> str | None:
    """Return an address of the host, or None if one of them is not public. Raises OSError if there is none."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = [str(each[4][0]) for each in found]
    return addresses[0] if all(map(_is_public, addresses)) else None


def _is_public(text: str) -> bool:
    address = ip_address(text.partition("%")[0])
    if isinstance(address, IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour
        if address in _NAT64:
            inner = IPv4Address(address.packed[-4:])
        if inner is not None:
            return _is_public(str(inner))
    return address.is_global and not address.is_multicast


def _checked(secret: Secrets | None) -> Secrets:
    """Return the secrets if they can be read. The error does not show them."""
    each = [] if secret is None else [secret] if isinstance(secret, str) else list(secret)
    for one in each:
        try:
            usable = len(b64decode(one.removeprefix("whsec_"), validate=True)) >= 16
        except ValueError:
            usable = False
        if not usable:
            raise ConfigurationError("a secret of webhooks is whsec_ and then at least 16 bytes in base64")
    return each


def _constant(secrets: Secrets) -> Callable[[Message], Secrets]:
    return lambda message: secrets
