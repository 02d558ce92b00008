"""The Django app ``semel.http.django``: its migrations create the tables, and its checks look at the project.

``manage.py check`` reports settings that are missing or wrong, and views that are not declared.
"""

from __future__ import annotations

from typing import Any, Final

from django.apps import AppConfig
from django.conf import settings
from django.core.checks import CheckMessage, Error, Warning, register

from semel.engine.guard import Guard
from semel.engine.sync import SyncGuard
from semel.errors import ConfigurationError, NotMigrated, StoreError
from semel.http.contract.routes import undeclared
from semel.http.contract.rules import Exempt
from semel.http.django.handling import NO_TENANT, configuration
from semel.http.django.urls import endpoints

MIDDLEWARE: Final = "semel.http.django.IdempotencyMiddleware"
_GZIP: Final = "django.middleware.gzip.GZipMiddleware"


class SemelConfig(AppConfig):  # type: ignore[misc]  # Django is not typed
    """Listed in INSTALLED_APPS as ``semel.http.django``."""

    name = "semel.http.django"
    label = "semel"
    verbose_name = "Semel"

    def ready(self) -> None:
        register(check_settings)
        register(check_views)


def check_settings(**options: Any) -> list[CheckMessage]:
    """Check the ``SEMEL`` setting, and the place of the middleware."""
    listed = list(settings.MIDDLEWARE)
    if MIDDLEWARE not in listed:
        return []
    messages = []
    try:
        config = configuration()
    except ConfigurationError as error:
        messages.append(Error(str(error), id="semel.E001"))
    else:
        if config.tenant is None and not config.guard.tenant:
            messages.append(
                Warning(
                    NO_TENANT,
                    hint='Name a function of the request, such as "semel.http.django.user".',
                    id="semel.W001",
                )
            )
        messages += _check_tables(config.guard)
    if _GZIP in listed[listed.index(MIDDLEWARE) :]:
        messages.append(
            Warning(
                "GZipMiddleware stands after IdempotencyMiddleware: compressed answers are stored, and a replay is "
                "compressed as the first answer was, or decompressed",
                hint="Put IdempotencyMiddleware last.",
                id="semel.W003",
            )
        )
    return messages


def _check_tables(guard: Guard) -> list[CheckMessage]:
    """Warn if the store lacks its tables. An Error would stop ``manage.py migrate``, which may create them."""
    try:
        if isinstance(guard, SyncGuard):
            guard.check()
    except NotMigrated as error:
        hint = "Create them with `manage.py migrate` if the store is one of DATABASES, else with `semel migrate URL`."
        return [Warning(str(error), hint=hint, id="semel.W004")]
    except StoreError:
        pass  # it is away, which says nothing about the project
    return []


def check_views(**options: Any) -> list[CheckMessage]:
    """Check that declared views have the middleware, and warn of views that are not declared."""
    if not hasattr(settings, "ROOT_URLCONF"):
        return []
    listed = endpoints()
    if MIDDLEWARE not in settings.MIDDLEWARE:
        unprotected = [str(each) for each in listed if each.rule is not None and not isinstance(each.rule, Exempt)]
        if not unprotected:
            return []
        return [
            Error(
                f"these views are declared, but the middleware is not installed: {', '.join(unprotected)}",
                hint=f'Add "{MIDDLEWARE}" at the end of MIDDLEWARE.',
                id="semel.E002",
            )
        ]
    return [
        Warning(
            f"{each} will run again if a client retries",
            hint='Declare it @idempotent(), @conditional() or @natural(), or @exempt("why") where that does no harm.',
            id="semel.W002",
        )
        for each in undeclared(listed)
    ]
