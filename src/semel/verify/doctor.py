"""Examine a live configuration: the store's server and tables, what waits in them, the window, and the routes.

Each check is a function of its own that yields findings. A store that cannot be reached is a finding, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any, Final

from semel.core.messaging.messages import InspectOutbox
from semel.core.ops import ListRecords, Measure
from semel.core.policy import duration
from semel.core.states import State
from semel.core.values import value
from semel.engine.ports import Store
from semel.errors import NotMigrated, SchemaDrift, SemelError, StoreError
from semel.http.contract.routes import undeclared
from semel.http.contract.rules import SAFE_METHODS, Idempotent
from semel.http.describe.design import Installation
from semel.stores.sizing import Needs
from semel.stores.urls import check_store, has_outbox, open_any_store, store_risks, tiers
from semel.verify.findings import ERROR, WARNING, Finding

LATE: Final = 3600.0
"""A sweep is late if the oldest expired record has waited for more seconds than this."""
STUCK: Final = 300.0
"""Seconds after which an abandoned operation, or a message in the outbox, is stuck."""
_SERIOUS: Final = frozenset({"eviction", "no-persistence", "fsync-off", "late-commits", "read-only"})
"""Risks that make operations run twice in the ordinary life of a server."""


@value
class Window:
    """For how long answers are kept, and for how long they are needed."""

    seconds: float | None
    """None: as the routes say."""
    needs: Needs


def examine(url: str, window: Window, service: Installation | None = None) -> list[Finding]:
    """Examine the store of this URL, and the service that uses it."""
    found = list(_store(url))
    if not any(finding.rule in ("unreachable", "not-migrated") for finding in found):
        found += _contents(url)
    return [*found, *_window(window, service), *([] if service is None else _service(service))]


def _store(url: str) -> Iterator[Finding]:
    if url.startswith("memory:"):
        text = "records in memory are lost at a restart, and no other process sees them: use a store that is shared"
        yield Finding("memory", WARNING, text)
    try:
        risks = store_risks(url)
        for risk in risks:
            severity = ERROR if risk.name in _SERIOUS else WARNING
            yield Finding(risk.name, severity, f"{risk.what}. Remedy: {risk.remedy}")
        if not any(risk.name == "read-only" for risk in risks):  # the check makes the tables elsewhere, to compare them
            check_store(url)
    except NotMigrated as error:
        yield Finding("not-migrated", ERROR, str(error))
    except SchemaDrift as error:
        yield Finding("schema-drift", ERROR, str(error))
    except SemelError as error:
        yield Finding("unreachable", ERROR, str(error))
        return
    if url.startswith("tiered:"):
        try:
            store_risks(tiers(url)[1])  # what it can lose is no risk, but it must be there
        except SemelError as error:
            yield Finding("cache-unreachable", WARNING, f"every retry asks the store behind the cache: {error}")


def _contents(url: str) -> Iterator[Finding]:
    try:
        with closing(open_any_store(url)) as store:
            yield from _records(store)
            if has_outbox(url):
                yield from _outbox(store)
    except StoreError as error:
        yield Finding("unreadable", WARNING, f"the records could not be looked at: {error}")


def _records(store: Store) -> Iterator[Finding]:
    if not store.lists:
        return
    lag = store.execute(Measure()).sweep_lag
    if lag > LATE:
        text = f"the oldest expired record is overdue by {duration(lag)}: run a guard with sweep_every=, or semel sweep"
        yield Finding("sweep-lag", WARNING, text)
    for state, rule, advice in (
        (State.UNKNOWN, "unknown-outcomes", "find out what happened, then semel resolve or semel release"),
        (State.ABANDONED, "abandoned", "a retry, a resumer (semel recover) or a person has to finish them"),
    ):
        page = store.execute(ListRecords(states=(state,), older=STUCK))
        if page.records:
            more = " or more" if page.after is not None else ""
            names = ", ".join(sorted({record.operation for record in page.records})[:5])
            text = f"{len(page.records)}{more} operations are {state.name.lower()} ({names}): {advice}"
            yield Finding(rule, WARNING, text)


def _outbox(store: Store) -> Iterator[Finding]:
    state = store.execute(InspectOutbox(20))
    for each in state.destinations:
        if each.oldest > STUCK:
            advice = "no relay runs: start semel relay" if not state.relays else "see semel outbox for what is stuck"
            where = f"for {each.destination} " if each.destination else ""
            text = f"the oldest message {where}has waited for {duration(each.oldest)}; {advice}"
            yield Finding("outbox-lag", WARNING if state.relays else ERROR, text)
    if state.held:
        text = f"{len(state.held)} streams are held back, such as {state.held[0].stream!r}: {state.held[0].reason}"
        yield Finding("held-streams", WARNING, text)


def _window(window: Window, service: Installation | None) -> Iterator[Finding]:
    longest = window.needs.longest()
    if longest is None:
        return
    name, needed = longest
    windows: list[tuple[float, str, str]] = []
    if window.seconds is not None:
        windows.append((window.seconds, "", ""))
    elif service is not None:
        windows += [(rule.policy.ttl_seconds, method, path) for method, path, rule in _keyed(service)]
    for seconds, method, path in windows:
        if seconds < needed:
            kept = f"answers are kept for {duration(seconds)}, and the {name} is {duration(needed)}"
            text = f"{kept}: late retries run again"
            yield Finding("window-too-short", ERROR, text, method, path)


def _service(service: Installation) -> Iterator[Finding]:
    if not service.tenant and not service.guard.tenant:
        text = "no tenant= is set: two customers with the same key get each other's answers"
        yield Finding("scope-unset", WARNING, text)
    for method, path, rule in _keyed(service):
        if rule.policy.fails_open:
            text = 'on_store_error="open": while the store is down, retries run again'
            yield Finding("fails-open", WARNING, text, method, path)
    for endpoint in undeclared(service.endpoints):
        text = "a write without a rule: declare it idempotent, conditional, natural or exempt"
        yield Finding("undeclared", WARNING, text, endpoint.method, endpoint.host + endpoint.path)


def _keyed(service: Installation) -> Iterator[tuple[str, str, Any]]:
    """Yield the routes with a key, and their rules under the guard's policy."""
    for endpoint in service.endpoints:
        if isinstance(endpoint.rule, Idempotent) and endpoint.method not in SAFE_METHODS:
            yield endpoint.method, endpoint.host + endpoint.path, endpoint.rule.under(service.guard.policy)
