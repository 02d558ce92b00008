"""Who may look, who may act, and that a POST comes from the console's own page.

The gate is closed by default: a console has a token, or a function of the application that lets somebody in. A session
is a cookie that the token has signed, so several processes accept it, and no process remembers anything. A form carries
a value that only a page of the same session can know.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import inspect
import ipaddress
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Final, TypeAlias
from urllib.parse import urlsplit

from semel.console.words import whole_number
from semel.errors import ConfigurationError, MissingDependency

try:
    from starlette.requests import Request
    from starlette.responses import Response
except ImportError as error:
    raise MissingDependency("starlette", "console") from error

SESSION: Final = 12 * 3600
"""Seconds that a session lasts."""
LONGEST_TOKEN: Final = 1024
PENALTY: Final = 0.5
"""Seconds that the answer to a wrong token takes."""
WRONG_AT_ONCE: Final = 4
"""How many wrong tokens may wait for their answers. While there are more, no token is looked at."""
_FORM: Final = b"semel console: form\0"


@dataclass(frozen=True, kw_only=True)
class Access:
    """What somebody may do in the console. ``allow=`` returns it."""

    who: str = "somebody"
    """The name in the audit log."""
    act: bool = False
    """Release and resolve records, redrive and delete dead letters."""
    show_keys: bool = False
    """See keys, tenants and message ids in full."""
    show_bodies: bool = False
    """See stored answers and the data of messages."""


Allow: TypeAlias = "Callable[[Request], Access | Awaitable[Access | None] | None]"
"""The type of ``allow=``. It returns None to whom the console is closed."""


class TooManyTries(Exception):
    """Several wrong tokens wait for their answers."""


class Gate:
    """Finds out who asks. It has a token or a function, never both."""

    def __init__(self, token: str | None, allow: Allow | None, *, show_keys: bool, show_bodies: bool) -> None:
        if (token is None) == (allow is None):
            raise ConfigurationError(
                "a console needs token=, or allow= with a function that says who may look and act, and not both"
            )
        if token is not None and not 1 <= len(token) <= LONGEST_TOKEN:
            raise ConfigurationError(f"a token has 1 to {LONGEST_TOKEN} characters: use secrets.token_urlsafe()")
        self._allow = allow
        self._token = (token or "").encode()
        self._key = hmac.digest(self._token, b"semel console: session", "sha256")
        self._signed_in = Access(who="token", act=True, show_keys=show_keys, show_bodies=show_bodies)
        self.cookie = f"semel_console_{hashlib.sha256(self._key).hexdigest()[:8]}"
        """The name of its cookie. Browsers do not tell ports apart, so two consoles of a machine need two names."""
        self._wrong = 0

    @property
    def has_token(self) -> bool:
        """Whether people sign in here."""
        return self._allow is None

    async def admit(self, request: Request) -> Access | None:
        """Return what the caller may do, or None."""
        if self._allow is not None:
            access = self._allow(request)
            return await access if inspect.isawaitable(access) else access
        bearer = _bearer(request)
        if bearer is not None:
            return self._holder(request) if await self.check(bearer) else None
        return self._holder(request) if self._is_session(request.cookies.get(self.cookie, "")) else None

    def _holder(self, request: Request) -> Access:
        """The access of somebody with the token. All that is known of them is where they are."""
        return replace(self._signed_in, who=f"token from {request.client.host if request.client else 'nowhere'}")

    async def check(self, token: str) -> bool:
        """Whether this is the token. A wrong one is answered late, and few are looked at in that time."""
        if self._wrong >= WRONG_AT_ONCE:
            raise TooManyTries
        if hmac.compare_digest(hashlib.sha256(token[: 2 * LONGEST_TOKEN].encode()).digest(), self._digest()):
            return True
        self._wrong += 1
        try:
            await asyncio.sleep(PENALTY)
        finally:
            self._wrong -= 1
        return False

    def _digest(self) -> bytes:
        return hashlib.sha256(self._token).digest()

    def _is_session(self, cookie: str) -> bool:
        text, _, signature = cookie.rpartition(".")
        expires = text.partition(".")[0]
        if not hmac.compare_digest(signature.encode(), self._signature(text).encode()):
            return False
        return time.time() < (whole_number(expires) or 0)

    def _signature(self, text: str) -> str:
        return hmac.new(self._key, text.encode(), "sha256").hexdigest()

    def open_session(self, request: Request, response: Response) -> None:
        """Set the cookie of a new session."""
        text = f"{int(time.time()) + SESSION}.{secrets.token_hex(16)}"
        self._set_cookie(request, response, f"{text}.{self._signature(text)}", SESSION)

    def close_session(self, request: Request, response: Response) -> None:
        """Take the cookie back."""
        self._set_cookie(request, response, "", 0)

    def form_token(self, request: Request) -> tuple[str, str | None]:
        """Return what the forms of a page carry, and the cookie for a caller that has none; see ``remember``."""
        cookie = request.cookies.get(self.cookie, "")
        if cookie:
            return _form_token(cookie), None
        cookie = secrets.token_hex(16)
        return _form_token(cookie), cookie

    def remember(self, request: Request, response: Response, cookie: str) -> None:
        """Set the cookie that ``form_token`` has made."""
        self._set_cookie(request, response, cookie, SESSION)

    def forged(self, request: Request, form_token: str) -> str | None:
        """Return why this POST may not come from the console's own page; None if it does."""
        origin = request.headers.get("origin")
        if origin is not None and urlsplit(origin).netloc != request.headers.get("host"):
            return "the request comes from another site"
        if request.headers.get("sec-fetch-site", "same-origin") != "same-origin":
            return "the request comes from another site"
        if self.has_token and _bearer(request) is not None:
            return None  # it was checked, and no browser adds this header by itself
        cookie = request.cookies.get(self.cookie, "")
        if not cookie or not hmac.compare_digest(_form_token(cookie).encode(), form_token.encode()):
            return "the form is not of this session: open the page again"
        return None

    def _set_cookie(self, request: Request, response: Response, value: str, seconds: int) -> None:
        response.set_cookie(
            self.cookie, value, max_age=seconds, path=request.scope.get("root_path") or "/", httponly=True,
            samesite="strict", secure=request.url.scheme == "https",
        )  # fmt: skip


def _bearer(request: Request) -> str | None:
    scheme, _, credentials = request.headers.get("authorization", "").partition(" ")
    return credentials.strip() if scheme.lower() == "bearer" else None


def _form_token(cookie: str) -> str:
    return hashlib.sha256(_FORM + cookie.encode()).hexdigest()


def is_loopback(host: str) -> bool:
    """Whether this names the machine itself."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def allow_on_this_machine(access: Access) -> Allow:
    """Return an ``allow=`` that lets in whoever is on this machine.

    The Host header is checked: a page on the internet can point its own name to this address, and would read along.
    """

    def allow(request: Request) -> Access | None:
        try:
            named = urlsplit("//" + request.headers.get("host", "")).hostname or ""
        except ValueError:
            return None
        here = request.client is None or is_loopback(request.client.host)
        return access if here and is_loopback(named) else None

    return allow
