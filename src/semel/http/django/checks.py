"""What ``manage.py check`` says about a project: settings that are missing, and views that are not declared."""

from __future__ import annotations

from typing import Any, Final

from django.conf import settings
from django.core.checks import CheckMessage, Error, Warning

from semel.errors import ConfigurationError
from semel.http.contract.inventory import undeclared
from semel.http.contract.rules import Exempt
from semel.http.django.configuration import configuration
from semel.http.django.urls import endpoints

__all__ = ["check_settings", "check_views"]

MIDDLEWARE: Final = "semel.http.django.IdempotencyMiddleware"
_BEFORE: Final = "django.middleware.gzip.GZipMiddleware"


def check_settings(**asked: Any) -> list[CheckMessage]:
    """The ``SEMEL`` setting, and the middleware's place."""
    listed = list(settings.MIDDLEWARE)
    if MIDDLEWARE not in listed:
        return []
    found = []
    try:
        said = configuration()
    except ConfigurationError as error:
        found.append(Error(str(error), id="semel.E001"))
    else:
        if said.tenant is None and not said.guard.tenant:
            found.append(
                Warning(
                    "SEMEL has no TENANT: all callers share one space of keys, so one may be given another's answer",
                    hint='Name a function of the request, such as "semel.http.django.user".',
                    id="semel.W001",
                )
            )
    if _BEFORE in listed[listed.index(MIDDLEWARE) :]:
        found.append(
            Warning(
                "GZipMiddleware stands after IdempotencyMiddleware: replays are compressed as the first answer was, "
                "whatever their client accepts",
                hint="Put IdempotencyMiddleware last.",
                id="semel.W003",
            )
        )
    return found


def check_views(**asked: Any) -> list[CheckMessage]:
    """Views that are declared in vain, and those that are not declared."""
    if not hasattr(settings, "ROOT_URLCONF"):
        return []
    listed = endpoints()
    if MIDDLEWARE not in settings.MIDDLEWARE:
        lost = [str(each) for each in listed if each.rule is not None and not isinstance(each.rule, Exempt)]
        if not lost:
            return []
        return [
            Error(
                f"these views are declared to happen once, and cannot be: {', '.join(lost)}",
                hint=f'Add "{MIDDLEWARE}" at the end of MIDDLEWARE.',
                id="semel.E002",
            )
        ]
    return [
        Warning(
            f"{each} can be repeated by a client, and will then happen again",
            hint='Declare it @idempotent(), @conditional() or @natural(), or @exempt("why") where that does no harm.',
            id="semel.W002",
        )
        for each in undeclared(listed)
    ]
