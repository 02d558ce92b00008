"""``IdempotencyMiddleware``: the last entry of ``MIDDLEWARE``, so that all others see a replay like any answer."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from asgiref.sync import iscoroutinefunction, markcoroutinefunction
from django.conf import settings
from django.core.handlers.asgi import ASGIRequest

from semel.engine.sync import SyncGuard
from semel.errors import ConfigurationError, StoreError
from semel.http.contract.routes import report
from semel.http.django.configuration import configuration
from semel.http.django.under_asgi import UnderASGI
from semel.http.django.under_wsgi import UnderWSGI
from semel.http.django.urls import endpoints

if TYPE_CHECKING:
    from django.http import HttpRequest

__all__ = ["IdempotencyMiddleware"]

_log = logging.getLogger("semel.http")


class IdempotencyMiddleware:
    """Runs sync under WSGI and async under ASGI, as Django requires."""

    sync_capable = True
    async_capable = True

    def __init__(self, get_response: Callable[[HttpRequest], Any]) -> None:
        config = configuration()
        if isinstance(config.guard, SyncGuard):  # an async one asks when its first request comes
            try:
                config.guard.check()
            except StoreError as error:
                _log.warning("the application starts, but its store cannot be used: %s", error)
        self._under: UnderASGI | UnderWSGI
        if iscoroutinefunction(get_response):
            self._under = UnderASGI(get_response, config)
            markcoroutinefunction(self)
        else:
            self._under = UnderWSGI(get_response, config)
        if config.tenant is None and not config.guard.tenant:
            warnings.warn(
                "SEMEL has no TENANT: all callers share one space of keys, so one may get another's answer",
                stacklevel=2,
            )
        if hasattr(settings, "ROOT_URLCONF"):
            listed = endpoints()
            report(listed)
            self._under.expect([each.rule for each in listed])

    def __call__(self, request: HttpRequest) -> Any:
        under = self._under
        if isinstance(under, UnderWSGI) and isinstance(request, ASGIRequest):
            raise ConfigurationError(
                "under ASGI, IdempotencyMiddleware must come after all middlewares that are sync only: put it last"
            )
        return under.respond(request)
