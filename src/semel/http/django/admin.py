"""The guard's records in Django's admin: to look at, and to settle when an outcome is unknown.

Nothing is edited. Who has the permission to *view* records sees them. Who may *change* them can release or resolve a
record that is unknown or abandoned. That is written into the admin's log, and to the logger ``semel.audit``.
"""

from __future__ import annotations

import json
from typing import Any, Final

from asgiref.sync import async_to_sync, iscoroutinefunction
from django.contrib import admin, messages
from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpRequest, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import path, reverse

from semel.core.lineage import read_label
from semel.core.ops import Lookup, Record
from semel.core.policy import duration
from semel.core.states import State
from semel.engine.audit_log import log_act
from semel.errors import SemelError
from semel.http.django.handling import configuration
from semel.http.django.models import IdempotencyRecord

_SETTLED: Final = (State.UNKNOWN, State.ABANDONED)
"""The states that a person can settle."""
_SHOWN: Final = tuple(state for state in State if state is not State.ABSENT)
_LONGEST_RESULT: Final = 8192


@admin.register(IdempotencyRecord)
class IdempotencyRecordAdmin(admin.ModelAdmin):  # type: ignore[misc]  # Django is not typed
    """Lists records, shows one, and settles it."""

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: object = None) -> bool:
        return False

    def get_urls(self) -> list[Any]:
        wrapped, name = self.admin_site.admin_view, "semel_idempotencyrecord"
        return [
            path("", wrapped(self.changelist_view), name=f"{name}_changelist"),
            path("<str:object_id>/change/", wrapped(self.change_view), name=f"{name}_change"),
        ]

    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> TemplateResponse:
        """A page of records. It looks at a bounded number of them, whatever the filters are."""
        self._require(request, self.has_view_permission(request))
        asked = {name: request.GET.get(name, "").strip() for name in ("state", "operation", "tenant", "after")}
        filters: dict[str, Any] = {name: asked[name] for name in ("operation", "tenant") if asked[name]}
        if asked["state"] in {state.name.lower() for state in _SHOWN}:
            filters["states"] = [State[asked["state"].upper()]]
        context: dict[str, Any] = {"asked": asked, "states": [state.name.lower() for state in _SHOWN]}
        try:
            context["page"] = page = _ask(_guard().list_page, after=asked["after"] or None, **filters)
            context["records"] = [_row(record) for record in page.records]
        except SemelError as error:
            messages.error(request, f"The store cannot be read: {error}")
        return self._page(request, "list", "Idempotency records", context)

    def change_view(
        self, request: HttpRequest, object_id: str, form_url: str = "", extra_context: Any = None
    ) -> TemplateResponse | HttpResponseRedirect:
        """One record, and the ways to settle it."""
        self._require(request, self.has_view_permission(request))
        record = _find(object_id)
        if record is None:
            raise Http404("There is no such record: it was released, or it has expired.")
        may_settle = self.has_change_permission(request) and record.state in _SETTLED
        if request.method == "POST":
            self._require(request, self.has_change_permission(request))
            self._settle(request, record)
            return HttpResponseRedirect(reverse(f"{self.admin_site.name}:semel_idempotencyrecord_changelist"))
        context = {"record": _row(record), "may_settle": may_settle}
        return self._page(request, "record", f"{record.operation} {record.key or ''}", context)

    def _settle(self, request: HttpRequest, record: Record) -> None:
        """Release or resolve the record, if it is still the one that was shown. Says what came of it."""
        way, guard = request.POST.get("way"), _guard()
        tenant = record.tenant or None
        try:
            if str(record.token) != request.POST.get("token") or record.state not in _SETTLED:
                raise ValueError(
                    f"the record has changed since the page was shown, and is {record.state.name.lower()} now"
                )
            if record.key is None:
                raise ValueError(
                    "its key is stored as a hash only: use `semel release` or `semel resolve` with the key"
                )
            if way == "release":
                _ask(guard.release, record.operation, record.key, tenant=tenant, expected=record)
            elif way == "resolve":
                text = request.POST.get("result", "")[:_LONGEST_RESULT]
                _ask(guard.resolve, record.operation, record.key, json.loads(text), tenant=tenant, expected=record)
            else:
                raise ValueError("choose what happened")
        except (SemelError, ValueError) as error:
            messages.error(request, f"Nothing was changed: {error}")
            return
        done = "Released: it did not happen." if way == "release" else "Resolved: it did happen."
        self.log_change(request, IdempotencyRecord(record.id.hex()), f"{done} {record.operation}")
        log_act(way, str(request.user), "admin", id=record.id.hex(), operation=record.operation)
        messages.success(request, done)

    def _require(self, request: HttpRequest, allowed: bool) -> None:
        if not allowed:
            raise PermissionDenied

    def _page(self, request: HttpRequest, name: str, title: str, context: dict[str, Any]) -> TemplateResponse:
        whole = {**self.admin_site.each_context(request), "title": title, "opts": self.opts, **context}
        return TemplateResponse(request, f"admin/semel/idempotencyrecord/{name}.html", whole)


def _guard() -> Any:
    """The guard of the project: a Semel, or an AsyncSemel with the same methods."""
    return configuration().guard


def _ask(method: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a method of the guard in this thread."""
    return (async_to_sync(method) if iscoroutinefunction(method) else method)(*args, **kwargs)


def _find(id: str) -> Record | None:
    try:
        found: Record | None = _ask(_guard().store.execute, Lookup(bytes.fromhex(id)))
    except ValueError:
        return None
    return None if found is None else read_label(found)


def _row(record: Record) -> dict[str, Any]:
    """A record for a template. What is stored in it is left out: it may be a secret."""
    return {
        "id": record.id.hex(),
        "state": record.state.name.lower(),
        "operation": record.operation,
        "tenant": record.tenant,
        "key": record.key,
        "attempt": record.attempt,
        "token": record.token,
        "age": duration(record.age),
        "expires_in": duration(record.expires_in),
    }
