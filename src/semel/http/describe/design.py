"""A service's idempotency as plain data: routes, store, replay contract, errors, an example. Pages are made from it."""

from __future__ import annotations

import inspect
from typing import Any, Final

from semel.core.policy import Policy
from semel.engine.guard import Guard
from semel.http.contract.inventory import Endpoint, undeclared
from semel.http.contract.rules import REPLAY_HEADERS, SAFE_METHODS, Idempotent
from semel.http.describe.example_exchange import chosen, example_exchange
from semel.http.describe.installed import Installed
from semel.http.describe.paths import example_path
from semel.http.describe.plain_rules import duration_text, plain_rule
from semel.http.describe.refusals import refusals

__all__ = ["design_of"]

_SPELLED: Final = {"etag": "ETag"}
_NEVER: Final = ("Set-Cookie", "WWW-Authenticate", "Date")


def design_of(name: str, service: Installed) -> dict[str, Any]:
    """What can be said of the service, for ``json.dumps`` or a page.

    :param name: of the application, as the page calls it.
    """
    guard, policy = service.guard, service.guard.policy
    declared = [each for each in service.endpoints if each.rule is not None and each.method not in SAFE_METHODS]
    shown = chosen(declared)
    return {
        "application": name,
        "framework": service.framework,
        "tenant": _tenant(service),
        "docs": service.docs,
        "store": _store(guard),
        "records": _records(guard),
        "routes": [_route(each, policy) for each in declared],
        "undeclared": [_place(each) for each in undeclared(service.endpoints)],
        "replay": _replay(),
        "errors": _errors(declared, guard),
        "example": [] if shown is None else [
            {"title": step.title, "request": step.request, "answer": step.answer}
            for step in example_exchange(shown, policy, service.docs)
        ],
    }  # fmt: skip


def _tenant(service: Installed) -> dict[str, str] | None:
    if service.tenant:
        return {"found_by": service.tenant}
    return {"fixed": service.guard.tenant} if service.guard.tenant else None


def _place(endpoint: Endpoint) -> dict[str, Any]:
    return {"method": endpoint.method, "path": endpoint.path, "name": endpoint.name}


def _route(endpoint: Endpoint, policy: Policy) -> dict[str, Any]:
    rule = endpoint.rule
    assert rule is not None
    route = {**_place(endpoint), **plain_rule(rule, policy)}
    if isinstance(rule, Idempotent):
        under = rule.under(policy)
        route["key_source"] = "Idempotency-Key"
        route["failures"] = "remembered" if under.stores(500) else "run again"
        route["replay_marker"] = under.replay_marker.title()
        route["max_stored_body"] = under.max_stored_body if under.keep_body else 0
    return route


def _store(guard: Guard) -> dict[str, Any]:
    store = guard.store
    about = (inspect.getdoc(type(store)) or "").partition("\n\n")[0].replace("\n", " ")
    return {
        "kind": type(store).__name__,
        "about": about,
        "wakes": store.wakes,
        "counts": store.counts,
    }


def _records(guard: Guard) -> dict[str, Any]:
    """How the guard keeps them. No secret, and nothing that leads to one."""
    settings, codec = guard._settings, guard._codec
    quota = settings["quota"]
    return {
        "guarantee": guard.policy.guarantee,
        "keys": "readable" if settings["readable_keys"] else "hashed only",
        "fingerprint": "keyed with a secret" if guard.secret else "a plain hash",
        "encrypted": codec.cipher is not None,
        "quota": None if quota is None else quota.live_keys,
        "sweep_every": None if guard._sweep_every is None else duration_text(guard._sweep_every),
    }


def _replay() -> dict[str, Any]:
    return {
        "headers": sorted(_SPELLED.get(name, name.title()) for name in REPLAY_HEADERS),
        "never": list(_NEVER),
    }


def _errors(declared: list[Endpoint], guard: Guard) -> list[dict[str, Any]]:
    """All that any route can answer with, and which can."""
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for endpoint in declared:
        quota = guard._meter is not None
        for each in refusals(endpoint.rule, guard.policy, quota=quota, path=example_path(endpoint.path)):
            known = {"code": each.code, "status": each.status, "retryable": each.error.retryable, "when": each.when}
            error = found.setdefault((each.code, each.status), {**known, "routes": []})
            error["when"] = min(error["when"], each.when, key=len)  # without what is special to one route
            error["routes"].append(f"{endpoint.method} {endpoint.path}")
    return sorted(found.values(), key=lambda error: (error["status"], error["code"]))
