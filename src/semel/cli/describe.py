"""``semel describe``: the "Idempotency" section of a service's design, written from the service itself."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from contextlib import redirect_stdout
from typing import Any, Final

from semel.cli.commands import OK, Command, load

_LEASED: Final = (
    "- The claim is one atomic write, made before the handler runs. Its owner holds a lease, renewed while it runs; an "
    "owner that comes back late is fenced off by its token."
)
_TRANSACTIONAL: Final = (
    "- A route with one transaction has no lease: the handler's rows and the record are committed together, or rolled "
    "back together."
)
_ABANDONED: Final = {
    "retry": "runs again",
    "reject": "500 until resolved",
    "recover": "the recover hook decides",
    "rollback": "rolled back, runs again",
}


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "app", metavar="MODULE:APP", help="the application, as a server is given it: shop.main:app, shop:make_app()"
    )
    parser.add_argument("--app-dir", default=".", metavar="DIR", help="where to import it from (default: here)")
    shape = parser.add_mutually_exclusive_group()
    shape.add_argument(
        "--markdown", action="store_true", help="a section in Markdown for a design document: the default"
    )
    shape.add_argument("--json", action="store_true", help="one JSON object")


def run(args: argparse.Namespace) -> int:
    from semel.http.describe.design import design_of, find_installation

    with redirect_stdout(sys.stderr):  # what the application prints does not belong to the page
        design = design_of(args.app, find_installation(load(args.app, args.app_dir)))
    print(json.dumps(design, indent=2, ensure_ascii=False) if args.json else page(design))
    return OK


def page(design: dict[str, Any]) -> str:
    """The section, from its heading on."""
    parts = [
        _head(design),
        *_routes(design["routes"]),
        _undeclared(design["undeclared"]),
        *_keys(design),
        *_store(design["store"], design["records"], [each for each in design["routes"] if "lease" in each]),
        *_replay(design),
        *_errors(design["errors"]),
        *_example(design["example"]),
    ]
    return "\n\n".join(part for part in parts if part)


def _head(design: dict[str, Any]) -> str:
    text = f"## Idempotency\n\nOf `{design['application']}` ({design['framework']})."
    return f"{text} Errors are explained at <{design['docs']}>." if design["docs"] else text


def _routes(routes: Sequence[dict[str, Any]]) -> list[str]:
    found = ["### Routes"]
    claimed = [route for route in routes if "key_source" in route]
    if claimed:
        head = ("route", "class", "key", "scope", "window", "lease", "duplicate", "abandoned", "store down", "5xx")
        found.append(_table(head, (_claimed(route) for route in claimed)))
    others = [route for route in routes if "key_source" not in route]
    if others:
        found.append(_table(("route", "class", "why it may be repeated"), (_other(route) for route in others)))
    if not routes:
        found.append("No route is declared.")
    return found


def _claimed(route: dict[str, Any]) -> Iterable[str]:
    waits = route["on_duplicate"]
    yield _place(route)
    needs = route["class"] == "conditional" and route.get("precondition_required", True)
    yield f"{route['class']}, {route['guarantee'].replace('_', ' ')}" + (", needs `If-Match`" if needs else "")
    yield f"{route['key_source']}, {_format(route['key_format'])}, {'required' if route['required'] else 'optional'}"
    yield "one request in the service" if route["scope"] == "tenant" else "this method and path"
    window = route["ttl"] or "for ever"
    yield f"{window}, then refused for {route['reject_expired_for']}" if "reject_expired_for" in route else window
    yield route["lease"] or "none: one transaction"
    status = route.get("in_use_status", 409)
    yield f"{status}" if waits == "raise" else f"waits {waits['wait']}, then {status}"
    yield _ABANDONED[route["on_abandoned"]]
    yield "runs unprotected" if route["on_store_error"] == "open" else "503, not run"
    yield "an answer: replayed" if route["failures"] == "remembered" else "frees the key"


def _other(route: dict[str, Any]) -> Iterable[str]:
    yield _place(route)
    yield route["class"]
    if route["class"] == "exempt":
        yield route["reason"]
    else:
        gone = ", ".join(str(status) for status in route["absent"])
        deleted = f"; {gone} becomes 204" if route["method"] == "DELETE" and gone else ""
        yield f"it says how things shall be{deleted}"


def _undeclared(routes: Sequence[dict[str, Any]]) -> str:
    if not routes:
        return ""
    lines = [f"- {_place(route)}" + (f" ({route['name']})" if route["name"] else "") for route in routes]
    return "\n".join(["**Not declared**, so a retry happens again:", "", *lines])


def _keys(design: dict[str, Any]) -> list[str]:
    tenant = design["tenant"]
    if tenant is None:
        whose = "**No tenant is set**: all callers share one space of keys, so one may be given another's answer."
    elif "fixed" in tenant:
        whose = f"All callers are one tenant, `{tenant['fixed']}`."
    else:
        whose = f"Keys are scoped by tenant, found by `{tenant['found_by']}`: equal keys of two tenants never meet."
    return [
        "### Keys",
        f"The client makes the key, one for each new request, and sends it as `{design['header']}` with the request "
        f"and with each retry of it. {whose}",
    ]


def _store(store: dict[str, Any], records: dict[str, Any], claimed: Sequence[dict[str, Any]]) -> list[str]:
    wakes = "is woken when the first ends" if store["wakes"] else "looks again and again, with growing pauses"
    lines = [
        f"- `{store['kind']}`. {store['about']}".rstrip(),
        *([_LEASED] if not claimed or any(each["lease"] is not None for each in claimed) else []),
        *([_TRANSACTIONAL] if any(each["lease"] is None for each in claimed) else []),
        f"- A duplicate that waits {wakes}.",
        f"- Keys are stored {'as sent' if records['keys'] == 'readable' else 'hashed only'}; the request is remembered "
        f"as {records['fingerprint']}; answers are {'encrypted' if records['encrypted'] else 'not encrypted'}.",
        f"- Expired records are removed every {records['sweep_every']}."
        if records["sweep_every"]
        else "- Expired records are removed by `semel sweep` only.",
    ]
    if records["quota"] is not None:
        lines.append(f"- A tenant may hold {records['quota']} live keys.")
    return ["### Store", "\n".join(lines)]


def _replay(design: dict[str, Any]) -> list[str]:
    marks = sorted({route["replay_marker"] for route in design["routes"] if "replay_marker" in route})
    if not marks:
        return []
    limits = sorted({route["max_stored_body"] for route in design["routes"] if "max_stored_body" in route})
    replay = design["replay"]
    lines = [
        f"- The first answer again: status, body bytes, and these headers: {_listed(replay['headers'])}. "
        f"Never {_listed(replay['never'])}.",
        *(
            f"- {_place(route)}: these headers only: {_listed(route['replay_headers'])}."
            for route in design["routes"]
            if "replay_headers" in route
        ),
        f"- Marked {_listed(f'{mark}: true' for mark in marks)}; `omitted` where the body was not kept, because it is "
        f"larger than the route's limit ({', '.join(map(str, limits))} bytes).",
        "- A replay travels as a first request does: what stands before the claim sees it too, authentication first.",
        "- The same request is one of the same method, path, query, content type, preconditions and body.",
    ]
    return ["### Replays", "\n".join(lines)]


def _errors(errors: Sequence[dict[str, Any]]) -> list[str]:
    if not errors:
        return []
    rows = (
        (str(each["status"]), f"`{each['code']}`", "yes" if each["retryable"] else "no", each["when"])
        for each in errors
    )
    return [
        "### Errors",
        "As `application/problem+json` (RFC 9457).",
        _table(("status", "code", "retry", "when"), rows),
    ]


def _example(steps: Sequence[dict[str, str]]) -> list[str]:
    if not steps:
        return []
    found = ["### Example", "What the handler says is made up; all the rest is as the service answers."]
    for step in steps:
        found += [f"{step['title']}:", f"```http\n{step['request']}\n```", f"```http\n{step['answer']}\n```"]
    return found


def _place(route: dict[str, Any]) -> str:
    return f"`{route['method']} {route['path']}`"


def _format(format: Any) -> str:
    if isinstance(format, str):
        return "any text" if format == "any" else format.upper()
    named = f"`{format['pattern']}`" if "pattern" in format else format["name"]
    return f"{named} of at most {format['max_length']} characters"


def _listed(words: Iterable[str]) -> str:
    return ", ".join(f"`{word}`" for word in words)


def _table(head: Sequence[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


DESCRIBE = Command(
    "describe",
    "Print what a service promises: routes, keys, store, replay contract, errors, an example.",
    configure,
    run,
)
