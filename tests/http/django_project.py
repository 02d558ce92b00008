"""A Django project for tests in this process: its settings are global, so each test has its own for a while."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import django
from django.apps import apps
from django.conf import settings
from django.test import AsyncClient, Client, override_settings
from django.utils.module_loading import import_string

if not settings.configured:
    settings.configure(LOGGING_CONFIG=None)
if not apps.ready:
    django.setup()
settings.SECRET_KEY = "not a secret"

MIDDLEWARE = "semel.http.django.IdempotencyMiddleware"
_ENGINE = "django.template.backends.django.DjangoTemplates"


def whose(request: Any) -> str:
    return str(request.headers.get("X-User", "alice"))


class Project:
    """``with Project(guard) as project: project.serve(path("pay", pay))``"""

    def __init__(self, guard: Any) -> None:
        self._guard = guard
        self._settings: list[Any] = []
        self._change(
            ALLOWED_HOSTS=["*"],
            TEMPLATES=[{"BACKEND": _ENGINE}],
            SESSION_ENGINE="django.contrib.sessions.backends.signed_cookies",
            REST_FRAMEWORK={"UNAUTHENTICATED_USER": None, "DEFAULT_AUTHENTICATION_CLASSES": []},
        )

    def __enter__(self) -> Project:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._settings:
            self._settings.pop().disable()

    def serve(
        self, *patterns: Any, middleware: Any = (MIDDLEWARE,), tenant: Any = whose, docs: Any = None, **more: Any
    ) -> None:
        """Serve these from now on. A middleware is named, or the factory itself; ``more`` are settings of SEMEL."""
        named = [each if isinstance(each, str) else _named(each) for each in middleware]
        said = {"GUARD": self._guard, "TENANT": tenant, "DOCS": docs, **{name.upper(): more[name] for name in more}}
        self._change(ROOT_URLCONF=patterns, MIDDLEWARE=named, SEMEL=said)

    def client(self) -> Client:
        return Client()

    def async_client(self) -> AsyncClient:
        return AsyncClient()

    def _change(self, **changes: Any) -> None:
        change = override_settings(**changes)
        change.enable()
        self._settings.append(change)


_factories: dict[str, Any] = {}


def _named(factory: Any) -> str:
    """A name that Django can import it by."""
    name = f"factory_{len(_factories)}"
    _factories[name] = factory
    globals()[name] = factory
    dotted = f"{__name__}.{name}"
    assert import_string(dotted) is factory
    return dotted
