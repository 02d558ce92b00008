"""Django's responses as status and header lines, and back. Django has one line for a name, except for cookies."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from django.http import HttpResponse, StreamingHttpResponse
from django.http.response import ResponseHeaders

if TYPE_CHECKING:
    from django.http.response import HttpResponseBase

__all__ = ["response_lines", "rewrite_response", "stream_response"]


def response_lines(response: HttpResponseBase) -> list[tuple[str, str]]:
    """Return the header lines of a response, as a server gets them."""
    cookies = [("Set-Cookie", cookie.output(header="").strip()) for cookie in response.cookies.values()]
    return [*response.items(), *cookies]


def rewrite_response(
    response: HttpResponseBase, status: int, lines: Iterable[tuple[str, str]], content: bytes
) -> HttpResponseBase:
    """Return the response with these header lines, or another one if its status or content differs."""
    if response.streaming or response.status_code != status or response.content != content:
        # If the status is the same, the reason phrase is the view's own.
        reason = response._reason_phrase if response.status_code == status else _phrase(status)
        response = _take_over(response, HttpResponse(content, status=status, reason=reason))
    return _set_headers(response, lines)


def stream_response(
    response: HttpResponseBase, lines: Iterable[tuple[str, str]], chunks: Iterable[bytes] | AsyncIterator[bytes]
) -> HttpResponseBase:
    """Return a streaming response with these header lines and chunks, in place of the response."""
    other = StreamingHttpResponse(chunks, status=response.status_code, reason=response._reason_phrase)
    return _set_headers(_take_over(response, other), lines)


def _take_over(old: HttpResponseBase, new: HttpResponseBase) -> HttpResponseBase:
    """Close with the new response what the old one has to close."""
    new._resource_closers.extend(old._resource_closers)
    new.cookies = old.cookies
    if old.has_header("Set-Cookie"):
        new["Set-Cookie"] = old["Set-Cookie"]
    new._charset = old._charset
    return new


def _set_headers(response: HttpResponseBase, lines: Iterable[tuple[str, str]]) -> HttpResponseBase:
    spelled = {name.lower(): name for name in response.headers}
    headers: Any = ResponseHeaders({})
    cookies = False
    for name, value in lines:
        low = name.lower()
        if low == "set-cookie":
            cookies = True
            if "set-cookie" in spelled:  # others are in response.cookies, and stay there
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
