"""Django's responses as status and header lines, and back. Django has one line for a name, cookies excepted."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from django.http import HttpResponse, StreamingHttpResponse
from django.http.response import ResponseHeaders

if TYPE_CHECKING:
    from django.http.response import HttpResponseBase

__all__ = ["lines_of", "rewritten", "streamed"]


def lines_of(response: HttpResponseBase) -> list[tuple[str, str]]:
    """As a server is given them."""
    cookies = [("Set-Cookie", cookie.output(header="").strip()) for cookie in response.cookies.values()]
    return [*response.items(), *cookies]


def rewritten(
    response: HttpResponseBase, status: int, lines: Iterable[tuple[str, str]], content: bytes
) -> HttpResponseBase:
    """The response with these lines, when it says the same; else another one in its place."""
    if response.streaming or response.status_code != status or response.content != content:
        # The words of an answer with the same status are the view's own.
        reason = response._reason_phrase if response.status_code == status else _phrase(status)
        response = _replaced(response, HttpResponse(content, status=status, reason=reason))
    return _headed(response, lines)


def streamed(
    response: HttpResponseBase, lines: Iterable[tuple[str, str]], chunks: Iterable[bytes] | AsyncIterator[bytes]
) -> HttpResponseBase:
    """The response with these lines, and its content made anew as it goes."""
    other = StreamingHttpResponse(chunks, status=response.status_code, reason=response._reason_phrase)
    return _headed(_replaced(response, other), lines)


def _replaced(old: HttpResponseBase, new: HttpResponseBase) -> HttpResponseBase:
    """What the old response has to close is closed with the new one."""
    new._resource_closers.extend(old._resource_closers)
    new.cookies = old.cookies
    if old.has_header("Set-Cookie"):
        new["Set-Cookie"] = old["Set-Cookie"]
    new._charset = old._charset
    return new


def _headed(response: HttpResponseBase, lines: Iterable[tuple[str, str]]) -> HttpResponseBase:
    spelled = {name.lower(): name for name in response.headers}
    headers: Any = ResponseHeaders({})
    cookies = False
    for name, value in lines:
        low = name.lower()
        if low == "set-cookie":
            cookies = True
            if "set-cookie" in spelled:  # any other is in response.cookies, and stays there
                headers[name] = response.headers[name]
        elif low in headers:
            headers[low] = f"{headers[low]}, {value}"
        else:
            headers[spelled.get(low, low.title())] = value
    if not cookies:
        response.cookies.clear()
    response.headers = headers
    return response


def _phrase(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "Unknown"
