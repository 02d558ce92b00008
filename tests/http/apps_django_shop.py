"""A Django service whose views are transactional, on a database of its own: functions, classes, REST framework."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from tests.http.django_project import MIDDLEWARE, Project  # first: REST framework wants settings when it is imported

from asgiref.sync import iscoroutinefunction, markcoroutinefunction, sync_to_async  # isort: skip
from django.db import connections  # isort: skip
from django.http import HttpResponse, JsonResponse  # isort: skip
from django.test import AsyncClient, Client  # isort: skip
from django.urls import path  # isort: skip
from django.views import View  # isort: skip
from rest_framework.exceptions import APIException  # isort: skip
from rest_framework.response import Response  # isort: skip
from rest_framework.views import APIView  # isort: skip

from semel import Operation, Semel
from semel.http.django import idempotent

_numbers = itertools.count(1)
Work = Callable[[Any, Operation], Any]


def database(url: str, **more: Any) -> str:
    """Make it known to Django; its alias."""
    alias = f"shop{next(_numbers)}"
    said: dict[str, Any] = {"ENGINE": "django.db.backends.sqlite3", "NAME": url, "OPTIONS": {"timeout": 20}}
    if url.startswith("postgresql:"):
        parts = urlsplit(url)
        said = {
            "ENGINE": "django.db.backends.postgresql", "NAME": parts.path[1:], "USER": parts.username,
            "HOST": parts.hostname, "PORT": parts.port, "OPTIONS": more.pop("options", {}),
        }  # fmt: skip
    connections.settings[alias] = connections.configure_settings({"default": {**said, **more}})["default"]
    return alias


def forget(alias: str) -> None:
    connections[alias].close()
    del connections[alias]
    del connections.settings[alias]


def function(alias: str, work: Work) -> Any:
    @idempotent(connection=alias, connection_parameter="conn")
    def pay(request: Any, conn: Any, op: Operation) -> HttpResponse:
        assert op.connection is conn is connections[alias]
        status, said = work(conn, op)
        return JsonResponse(said, status=status)

    return pay


def by_class(alias: str, work: Work) -> Any:
    class Pay(View):
        @idempotent(connection=alias)
        def post(self, request: Any, op: Operation) -> HttpResponse:
            status, said = work(connections[alias], op)
            return JsonResponse(said, status=status)

    return Pay.as_view()


def by_rest(alias: str, work: Work) -> Any:
    class Pay(APIView):  # type: ignore[misc]
        @idempotent(connection=alias)
        def post(self, request: Any, op: Operation) -> Response:
            request.data  # noqa: B018 (REST framework parses it from the stream)
            status, said = work(connections[alias], op)
            if status != 201:
                error = APIException("no")
                error.status_code = status
                raise error
            return Response(said, status=status)

    return Pay.as_view()


VIEWS = {"function": function, "class": by_class, "rest": by_rest}


class DjangoService:
    """Asked through Django's own clients, of WSGI or ASGI; a middleware outside of ours sees each answer leave."""

    def __init__(self, kind: str, url: str, guard: Semel, work: Work, *, in_loop: bool, **more: Any) -> None:
        self.alias = database(url, **more)
        self.in_loop = in_loop
        self.leaves: Callable[[], None] = lambda: None
        self.project = Project(guard)
        self.project.serve(path("pay", VIEWS[kind](self.alias, work)), middleware=(self._spy, MIDDLEWARE))
        self.loop = asyncio.Runner()

    def _spy(self, get_response: Any) -> Any:
        def seen(request: Any) -> Any:
            response = get_response(request)
            self.leaves()
            return response

        async def seen_soon(request: Any) -> Any:
            response = await get_response(request)
            await asyncio.to_thread(self.leaves)
            return response

        return markcoroutinefunction(seen_soon) if iscoroutinefunction(get_response) else seen

    _spy.async_capable = _spy.sync_capable = True  # type: ignore[attr-defined]

    async def asked(self, key: str, where: str = "/pay", body: bytes = b"{}", *, raises: bool = False) -> Any:
        client = AsyncClient(raise_request_exception=raises)
        headers = {"Idempotency-Key": key}
        return await client.post(where, body, content_type="application/json", headers=headers)

    def ask(self, key: str, where: str = "/pay", body: bytes = b"{}") -> Any:
        if self.in_loop:
            return self.loop.run(self.asked(key, where, body))
        client = Client(raise_request_exception=False)
        headers = {"Idempotency-Key": key}
        return client.post(where, body, content_type="application/json", headers=headers)

    def _disconnect(self) -> None:
        connections[self.alias].close()

    def close(self) -> None:
        self.loop.run(sync_to_async(self._disconnect)())  # in the thread of views
        self.loop.close()
        self.project.__exit__(None, None, None)
        forget(self.alias)
