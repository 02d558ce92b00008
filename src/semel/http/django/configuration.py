"""The ``SEMEL`` setting of a Django project, and the tenant of a request."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from asgiref.sync import async_to_sync, iscoroutinefunction, sync_to_async
from django.conf import settings
from django.core import mail
from django.utils.module_loading import import_string

from semel.core.values import value
from semel.engine.aio import AsyncGuard
from semel.engine.guard import Guard
from semel.engine.sync import SyncGuard
from semel.errors import ConfigurationError
from semel.http.contract.exchange import KEY_HEADER, KeyHeader
from semel.http.contract.rules import MAX_REQUEST_BODY, check_max_request_body
from semel.stores.memory import AsyncMemoryStore, MemoryStore

if TYPE_CHECKING:
    from django.http import HttpRequest

TenantResolver: TypeAlias = "Callable[[HttpRequest], Any]"

_KNOWN: Final = frozenset({"GUARD", "TEST_GUARD", "TENANT", "DOCS", "MAX_REQUEST_BODY", "HEADER"})


def user(request: HttpRequest) -> str | None:
    """Return the primary key of the authenticated user: a function for ``TENANT``. Anonymous requests are an error."""
    account = request.user
    return str(account.pk) if account.is_authenticated else None


@value
class Configuration:
    """The setting, checked and imported."""

    guard: Guard
    tenant: TenantResolver | None
    docs: str | None
    max_request_body: int = MAX_REQUEST_BODY
    key_header: KeyHeader = KEY_HEADER

    def has_key(self, request: HttpRequest) -> bool:
        """Whether the request has the header of the key, valid or not."""
        return self.key_header.variable in request.META

    def find_tenant(self, request: HttpRequest) -> str | None:
        """Call ``TENANT`` in a thread."""
        assert self.tenant is not None
        resolve = async_to_sync(self.tenant) if iscoroutinefunction(self.tenant) else self.tenant
        tenant: str | None = resolve(request)
        return tenant

    async def afind_tenant(self, request: HttpRequest) -> str | None:
        """Call ``TENANT`` in an event loop. A plain function may query the database, so it runs in a thread."""
        assert self.tenant is not None
        resolve = self.tenant if iscoroutinefunction(self.tenant) else sync_to_async(self.tenant)
        tenant: str | None = await resolve(request)
        return tenant


def configuration() -> Configuration:
    """Read ``settings.SEMEL``. Raises ConfigurationError."""
    setting = getattr(settings, "SEMEL", None)
    if not isinstance(setting, dict) or "GUARD" not in setting:
        raise ConfigurationError('the settings lack SEMEL = {"GUARD": "shop.once.guard", "TENANT": …}')
    if unknown := sorted(setting.keys() - _KNOWN):
        there = ", ".join(sorted(_KNOWN))
        raise ConfigurationError(f"SEMEL has unknown settings: {', '.join(unknown)}; there are {there}")
    in_tests = hasattr(mail, "outbox")  # by setup_test_environment(): Django's own sign
    guard = _guard("TEST_GUARD" if in_tests and "TEST_GUARD" in setting else "GUARD", setting)
    if in_tests and "TEST_GUARD" not in setting:
        _keep_in_memory(guard)
    tenant = _imported("TENANT", setting.get("TENANT"))
    if tenant is not None and not callable(tenant):
        raise ConfigurationError(f"SEMEL's TENANT is a function of the request, or its dotted path, not {tenant!r}")
    longest = setting.get("MAX_REQUEST_BODY", MAX_REQUEST_BODY)
    check_max_request_body(longest)
    key_header = KeyHeader(setting.get("HEADER", KEY_HEADER.title))
    return Configuration(guard, tenant, setting.get("DOCS"), longest, key_header)


def _guard(name: str, setting: dict[str, Any]) -> Guard:
    guard = _imported(name, setting[name])
    if not isinstance(guard, Guard) and callable(guard) and not inspect.isclass(guard):
        guard = _call_once(guard)
    if not isinstance(guard, Guard):
        raise ConfigurationError(f"SEMEL's {name} is a guard such as Semel(SQLiteStore('app.db')), not {guard!r}")
    return guard


def _keep_in_memory(guard: Guard) -> None:
    """While tests run, keep records in memory: the guard's store is the developer's own database, not the test one.

    Transactional views still write their records with their rows, into the test database.
    """
    if isinstance(guard, (AsyncGuard, SyncGuard)) and not isinstance(guard.store, (MemoryStore, AsyncMemoryStore)):
        store: Any = AsyncMemoryStore() if isinstance(guard, AsyncGuard) else MemoryStore()
        store.adopt = guard.store.adopt  # uses the view's connection, and none of the store's
        guard.use_store(store)


@functools.cache
def _call_once(make: Callable[[], Any]) -> Any:
    """Call it once: the middleware, the checks and the documents need the same guard."""
    return make()


def _imported(name: str, thing: Any) -> Any:
    if not isinstance(thing, str):
        return thing
    try:
        return import_string(thing)
    except ImportError as error:
        raise ConfigurationError(f"SEMEL's {name} cannot be imported: {error}") from error
