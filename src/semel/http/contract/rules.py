"""What a route promises on the wire: its class, how its key is read, what is fingerprinted, stored and replayed.

``Action`` needs a key and happens once for it. ``Conditional`` changes only what is still as the caller knows it.
``Natural`` says the same however often it is said. ``Exempt`` is none of these, on purpose.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, ClassVar, Final, Literal, Self, TypeAlias

from semel.core.keys import HeaderMode, KeyFormat
from semel.core.policy import Policy
from semel.errors import PolicyError

__all__ = [
    "MAX_REQUEST_BODY", "RELEASED", "REPLAY_HEADERS", "SAFE_METHODS", "Action", "Conditional", "Exempt", "Natural",
    "Rule", "check_max_request_body",
]  # fmt: skip

SAFE_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS", "TRACE"})
"""Never claimed, never replayed, whatever they carry."""

RELEASED: Final = frozenset({401, 403, 408, 409, 412, 423, 425, 428, 429})
"""Refusals that say nothing about the request itself: the same key may be used again."""

REPLAY_HEADERS: Final = frozenset(
    {
        b"content-type",
        b"content-language",
        b"content-encoding",
        b"content-disposition",
        b"location",
        b"content-location",
        b"etag",
        b"last-modified",
        b"link",
    }
)
"""Header lines that belong to the answer; all others belong to the exchange that carried it."""

_NEVER: Final = frozenset({b"set-cookie", b"www-authenticate", b"date"})
MAX_STORED_BODY: Final = 1024 * 1024
MAX_REQUEST_BODY: Final = 64 * 1024 * 1024
"""Bytes of a request's body that a claim takes, unless the route or the middleware says otherwise."""
_GUARDS: Final = Policy()
"""Stands for "as the guard's policy says"; known by its identity."""
_POLICY: Final = frozenset(each.name for each in fields(Policy) if each.init)


@dataclass(frozen=True, kw_only=True)
class Action:
    """A route that does something: it needs a key, and happens once for it."""

    kind: ClassVar[str] = "action"

    policy: Policy = _GUARDS
    """Left out: the guard's."""
    changes: tuple[tuple[str, Any], ...] = ()
    """Settings of the guard's policy that are other for this route; filled by ``declared``."""
    required: bool = True
    """False: without a key the route runs unprotected, and says so in the events."""
    key_mode: HeaderMode = "auto"
    key_format: KeyFormat = field(default_factory=lambda: KeyFormat.named("any"))
    reused_status: Literal[422, 409, 400] = 422
    """The status of "same key, other payload"."""
    scope: Literal["operation", "tenant"] = "operation"
    """``tenant``: a key is good for one request in all of the service, whatever its path."""
    external_effects: bool = False
    """The handler changes things outside of the database, so a 5xx answer is an answer: stored, and not run again."""
    released: frozenset[int] = RELEASED
    replay_headers: frozenset[bytes] = REPLAY_HEADERS
    replay_marker: bytes = b"idempotent-replayed"
    """The name of the header line that marks a replay."""
    fingerprint_headers: tuple[str, ...] = ()
    """Header lines that make it another request, beside Content-Type and the preconditions."""
    canonical_json: bool = False
    """Compare JSON bodies by what they say (RFC 8785), not by their bytes."""
    include: tuple[str, ...] = ()
    """Fields of a JSON body that count, by dotted path; empty: all."""
    exclude: tuple[str, ...] = ()
    """Fields of a JSON body that do not count."""
    max_stored_body: int = MAX_STORED_BODY
    """Bytes of an answer's body that are kept; a larger one is remembered without it."""
    max_request_body: int | None = None
    """Bytes of a request's body; a longer one is refused with 413, and nothing is run. None: as the middleware says."""
    keep_body: bool = True
    """False for routes that issue secrets: the answer is remembered without its body."""
    connection: Callable[[], Any] | None = None
    """Opens the connection or session (a context manager) that the handler writes its rows to: they and the answer are
    committed together, before the answer is sent. See ``semel.http.in_transaction``."""
    connection_parameter: str | None = None
    """The handler's parameter that is given this connection; ``op.connection`` has it as well."""

    def __post_init__(self) -> None:
        if self.reused_status not in (422, 409, 400):
            raise PolicyError(f"reused_status is 422, 409 or 400, not {self.reused_status!r}")
        if self.scope not in ("operation", "tenant"):
            raise PolicyError(f'scope is "operation" or "tenant", not {self.scope!r}')
        if any(name != name.lower() for name in self.replay_headers) or self.replay_marker.lower() in _NEVER:
            raise PolicyError("replay_headers are names in lower case, as bytes")
        if self.replay_headers & _NEVER:
            raise PolicyError("Set-Cookie, WWW-Authenticate and Date are never replayed: leave them out")
        if self.max_stored_body < 0:
            raise PolicyError("max_stored_body is a number of bytes, 0 or more")
        if self.max_request_body is not None:
            check_max_request_body(self.max_request_body)
        if self.policy.resumable:
            raise PolicyError("resumable= is said of a function whose arguments can be kept: @guard.once(…)")
        if self.connection is not None and not self.required:
            raise PolicyError("connection= needs a key on every request: required=True")
        if self.connection is not None and self.stores(500):
            # Whatever undoes the transaction undoes all that would remember what was done outside of it.
            said = "external_effects=True" if self.external_effects else 'guarantee="at_most_once"'
            raise PolicyError(
                f"connection= and {said} exclude each other: of a transaction that is rolled back nothing is left, so "
                "what the handler did outside of the database would be done again. Leave connection= out, and it is "
                "not; or, where all that it does is rows, which happen once by themselves, say only connection= "
                '(guarantee="effectively_once")'
            )
        if self.connection_parameter is not None and self.connection is None:
            raise PolicyError(
                "connection_parameter= names the parameter for the connection of connection=, which is not given"
            )
        if self.include and self.exclude:
            raise PolicyError("name the fields that count (include=) or those that do not (exclude=), not both")

    @cached_property
    def reads_json(self) -> bool:
        return self.canonical_json or bool(self.include or self.exclude)

    def stores(self, status: int) -> bool:
        """Whether an answer of this status is the answer, to be replayed; else the key is free again."""
        if status in self.released:
            return False
        return status < 500 or self.external_effects or self.policy.guarantee == "at_most_once"

    def under(self, policy: Policy) -> Self:
        """This rule under a guard's policy: that one, changed as the route says, unless the rule brings its own."""
        made = self.policy if self._brings_its_own else policy.replace(**dict(self.changes))
        if self.external_effects and made.on_interrupted is None:
            # What was cut short may have had its effect: that is like a crash, and not as if nothing had happened.
            made = made.replace(on_interrupted="abandon")
        return self if made is self.policy else replace(self, policy=made, changes=())

    @property
    def _brings_its_own(self) -> bool:
        return self.policy is not _GUARDS and not self.changes

    @classmethod
    def declared(cls, base: Self | None = None, **settings: Any) -> Self:
        """A rule from the keywords of a decorator: its own settings, and those of its policy."""
        _check_base(cls, base)
        known = {each.name for each in fields(cls)}
        own = {name: settings.pop(name) for name in list(settings) if name in known}
        if unknown := settings.keys() - _POLICY:
            there = sorted((known | _POLICY) - {"changes", "resumable"})
            raise PolicyError(f"unknown setting {', '.join(sorted(unknown))}; there are: {', '.join(there)}")
        if isinstance(own.get("key_format"), str):
            own["key_format"] = KeyFormat.named(own["key_format"])
        start = base or cls()
        if "policy" in own or start._brings_its_own:
            own["policy"] = own.get("policy", start.policy).replace(**settings)
            return replace(start, **{**own, "changes": ()})
        changes = {**dict(start.changes), **settings}
        return replace(start, **{**own, "policy": _GUARDS.replace(**changes), "changes": tuple(changes.items())})


@dataclass(frozen=True, kw_only=True)
class Conditional(Action):
    """A route that changes a resource only while it is as the caller knows it: If-Match, else 428.

    A key is welcome: then a retry of a change that was made is told the first answer, and not 412.
    """

    kind: ClassVar[str] = "conditional"

    required: bool = False
    precondition_required: bool = True
    """False: a request without If-Match or If-None-Match is let through, and changes whatever is there."""


@dataclass(frozen=True, kw_only=True)
class Natural:
    """A route that says how things shall be, so that a second call changes nothing: PUT of a whole, DELETE. No key."""

    kind: ClassVar[str] = "natural"

    absent: frozenset[int] = frozenset({404, 410})
    """Answers to a DELETE that mean "it is not there": they become 204, for that is what was asked for."""

    def settled(self, method: str, status: int) -> bool:
        """Whether this answer means that all is as the request wants it."""
        return method == "DELETE" and status in self.absent

    @classmethod
    def declared(cls, base: Self | None = None, **settings: Any) -> Self:
        """A rule from the keywords of a decorator."""
        _check_base(cls, base)
        known = sorted(each.name for each in fields(cls))
        if unknown := settings.keys() - set(known):
            raise PolicyError(f"unknown setting {', '.join(sorted(unknown))}; there are: {', '.join(known)}")
        return replace(base or cls(), **settings)


@dataclass(frozen=True)
class Exempt:
    """A route that is left alone on purpose, and why: a search by POST, a log-in."""

    kind: ClassVar[str] = "exempt"

    reason: str

    def __post_init__(self) -> None:
        _check_reason(self.reason)


def check_max_request_body(longest: object) -> None:
    """Refuse what is no number of bytes, when it is declared."""
    if type(longest) is not int or longest < 0:
        raise PolicyError(f"max_request_body is a number of bytes, 0 or more, not {longest!r}")


def _check_reason(reason: object) -> None:
    if not isinstance(reason, str) or not reason.strip():
        raise PolicyError('exempt() wants a reason, for whoever reads the start-up report: @exempt("it only reads")')


def _check_base(cls: type[Action] | type[Natural], base: object) -> None:
    if base is None or isinstance(base, cls):
        return
    if callable(base) and not isinstance(base, type):
        raise PolicyError(f"write @{cls.kind}(), with the brackets")
    example = f"{cls.__name__}.declared({'' if cls is Natural else 'required=False'})"
    raise PolicyError(f"@{cls.kind}() starts from rules of its own kind, such as {example}, not from {base!r}")


Rule: TypeAlias = Action | Natural | Exempt
"""What a route can be declared to be."""
