"""The rules that a route can be declared with, and the decorators that declare them.

An ``idempotent()`` route needs a key and runs once per key. A ``conditional()`` one changes only the version that the
caller has read. A ``natural()`` one has the same effect however often it is called. An ``exempt("why")`` one is
unprotected on purpose.

Each function returns a rule. A rule goes into the ``routes=`` of a middleware. A rule from the module of a framework,
such as ``semel.http.fastapi``, also decorates endpoints. This module knows no framework: see ``Decorators``.
"""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Callable, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from typing import Any, ClassVar, Final, Literal, NoReturn, Self, TypeAlias, TypedDict, TypeGuard, TypeVar, Unpack

from semel.core.encoding.canonical import select_fields
from semel.core.keys import HeaderMode, KeyFormat
from semel.core.policy import Policy
from semel.engine.guard import PolicyChanges
from semel.errors import PolicyError

SAFE_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS", "TRACE"})
"""Methods that are never claimed and never replayed."""

RELEASED: Final = frozenset({401, 403, 408, 409, 412, 423, 425, 428, 429})
"""Statuses that say nothing about the request itself: the answer is not stored, and the key may be used again."""

REPLAY_HEADERS: Final = frozenset(
    {
        "content-type",
        "content-language",
        "content-encoding",
        "content-disposition",
        "location",
        "content-location",
        "etag",
        "last-modified",
        "link",
        "vary",
    }
)
"""Headers that are part of the answer. All others belong to the single HTTP exchange, and are not replayed."""

NEVER_REPLAYED: Final = ("Set-Cookie", "WWW-Authenticate", "Date")
_NEVER: Final = frozenset(map(str.lower, NEVER_REPLAYED))
MAX_STORED_BODY: Final = 1024 * 1024
MAX_REQUEST_BODY: Final = 64 * 1024 * 1024
"""The longest request body that is accepted, in bytes, unless the route or the middleware sets another limit."""
IN_MEMORY: Final = 1024 * 1024
"""Bytes of a request body that are held in memory until the application reads it; a larger one goes to a file."""
_GUARDS: Final = Policy()
"""Means "the guard's policy"; recognised by identity."""
_TOKEN: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_GENERATORS: Final[tuple[tuple[Callable[[Any], bool], Callable[[Any], Any]], ...]] = (
    (inspect.isasyncgenfunction, asynccontextmanager), (inspect.isgeneratorfunction, contextmanager),
)  # fmt: skip
_POLICY: Final = frozenset(each.name for each in fields(Policy) if each.init)

F = TypeVar("F", bound=Callable[..., Any])
Protect: TypeAlias = Callable[[Any, Any], Any]
"""Wraps an endpoint of one framework: ``protect(endpoint, rule)`` returns the protected endpoint."""


class IdempotentSettings(PolicyChanges, total=False):
    """Keywords of ``idempotent()``: those of ``Idempotent``, and those of ``Policy`` that differ from the guard's."""

    policy: Policy
    required: bool
    key_mode: HeaderMode
    key_format: KeyFormat | str
    reused_status: Literal[422, 409, 400]
    in_use_status: Literal[409, 425, 429, 503]
    scope: Literal["operation", "tenant"]
    external_effects: bool
    released: frozenset[int]
    replay_headers: frozenset[str]
    replay_marker: str
    fingerprint_headers: tuple[str, ...]
    canonical_json: bool
    include: tuple[str, ...]
    exclude: tuple[str, ...]
    compare_parts: bool
    compare_decompressed: bool
    max_stored_body: int
    max_request_body: int | None
    keep_body: bool
    connection: Callable[[], Any] | str | None
    connection_parameter: str | None
    allow_decorators_below: bool


class ConditionalSettings(IdempotentSettings, total=False):
    """Keywords of ``conditional()``."""

    precondition_required: bool


class NaturalSettings(TypedDict, total=False):
    """Keywords of ``natural()``."""

    absent: frozenset[int]


def _no_framework(endpoint: Any, rule: Any) -> NoReturn:
    raise PolicyError(
        f"{rule.decorator} is for routes= here: to decorate an endpoint, import it from the module of your framework, "
        f"such as semel.http.fastapi"
    )


@dataclass(frozen=True, kw_only=True)
class _Declaration:
    """The base of all rules. A rule is a decorator: it is called with an endpoint."""

    kind: ClassVar[str]
    """The name of this kind of route in reports."""
    decorator: ClassVar[str]
    """The name of the function that declares it."""

    protect: Protect = field(default=_no_framework, repr=False, compare=False)

    def __call__(self, endpoint: F) -> F:
        """Return the endpoint, protected by this rule. It keeps its type."""
        protected: F = self.protect(endpoint, self)
        return protected


@dataclass(frozen=True, kw_only=True)
class Idempotent(_Declaration):
    """A route that needs a key and runs once per key."""

    kind: ClassVar[str] = "action"
    decorator: ClassVar[str] = "idempotent"

    policy: Policy = _GUARDS
    """Defaults to the guard's policy."""
    changes: tuple[tuple[str, Any], ...] = ()
    """Settings that differ from the guard's policy on this route."""
    required: bool = True
    """False: without a key the route runs unprotected and emits the event ``unkeyed``."""
    key_mode: HeaderMode = "auto"
    """How the header of the key is read. ``"auto"``: quoted or bare; ``"strict"``: quoted only; ``"raw"``: as it is."""
    key_format: KeyFormat = field(default_factory=lambda: KeyFormat.named("any"))
    """What keys must look like: ``"any"``, ``"uuid"``, ``"ulid"``, or a ``KeyFormat`` with a pattern of its own."""
    reused_status: Literal[422, 409, 400] = 422
    """The status of "same key, different payload"."""
    in_use_status: Literal[409, 425, 429, 503] = 409
    """The status of a duplicate while the first request still runs. Many clients never retry 409, and retry others."""
    scope: Literal["operation", "tenant"] = "operation"
    """``"tenant"``: a key belongs to one request in the whole service, whatever its path."""
    external_effects: bool = False
    """Whether the handler changes things outside the database. If so, a 5xx answer or an exception is stored and
    replayed until the ttl ends: the effect may have happened. Statuses that say that it did not go into ``released``.
    """
    released: frozenset[int] = RELEASED
    """Statuses that are not stored, and free the key."""
    replay_headers: frozenset[str] = REPLAY_HEADERS
    """Names of the headers that are stored with an answer and replayed; their case does not matter."""
    replay_marker: str = "idempotent-replayed"
    """The name of the header that marks a replay."""
    fingerprint_headers: tuple[str, ...] = ()
    """Headers that are part of the fingerprint, besides Content-Type and the preconditions."""
    canonical_json: bool = False
    """Compare JSON bodies by their content (RFC 8785), not by their bytes."""
    include: tuple[str, ...] = ()
    """Fields of a JSON body to compare, by dotted path; all of them by default, and if the body has none of these."""
    exclude: tuple[str, ...] = ()
    """Fields of a JSON body that are not compared."""
    compare_parts: bool = False
    """Compare multipart bodies by their parts, without the boundary, which a client makes anew for each retry."""
    compare_decompressed: bool = False
    """Compare bodies with ``Content-Encoding: gzip`` or ``deflate`` by what they decompress to, up to 8 MiB: a retry
    may be compressed in another way, or hold another time stamp."""
    max_stored_body: int = MAX_STORED_BODY
    """The longest answer body that is stored, in bytes. Of a longer answer only status and headers are stored."""
    max_request_body: int | None = None
    """The longest request body in bytes; a longer one is refused with 413. Defaults to the middleware's limit."""
    keep_body: bool = True
    """False for routes that issue secrets: the answer is stored without its body."""
    connection: Callable[[], Any] | None = None
    """Opens the connection or session that the handler writes its rows to: returns a context manager, or is a generator
    that yields it. The rows are committed with the answer, before it is sent. See ``semel.http.handlers``."""
    connection_parameter: str | None = None
    """The handler's parameter for this connection, which is also available as ``op.connection``."""
    allow_decorators_below: bool = False
    """True: none of the decorators below this one decides who may call, so a replay may skip them."""

    def __call__(self, endpoint: F) -> F:
        """Return the endpoint, protected by this rule. Warn of decorators below: a replay answers without them."""
        protected = super().__call__(endpoint)
        if not self.allow_decorators_below and _is_decorated(endpoint):
            warnings.warn(
                f"{getattr(endpoint, '__qualname__', endpoint)} has decorators below @{self.decorator}(), and a replay "
                "answers without them: one that checks who calls does not protect the stored answer. Put them above "
                f"@{self.decorator}(). If none of them decides who may call: {self.decorator}"
                "(allow_decorators_below=True)",
                stacklevel=2,
            )
        return protected

    def __post_init__(self) -> None:
        if self.reused_status not in (422, 409, 400):
            raise PolicyError(f"reused_status is 422, 409 or 400, not {self.reused_status!r}")
        if self.in_use_status not in (409, 425, 429, 503):
            raise PolicyError(f"in_use_status is 409, 425, 429 or 503, not {self.in_use_status!r}")
        if self.scope not in ("operation", "tenant"):
            raise PolicyError(f'scope is "operation" or "tenant", not {self.scope!r}')
        object.__setattr__(self, "replay_headers", frozenset(map(_header_name, self.replay_headers)))
        object.__setattr__(self, "replay_marker", _header_name(self.replay_marker))
        if self.replay_headers & _NEVER or self.replay_marker in _NEVER:
            raise PolicyError("Set-Cookie, WWW-Authenticate and Date are never replayed: leave them out")
        if self.max_stored_body < 0:
            raise PolicyError("max_stored_body is a number of bytes, 0 or more")
        if self.max_request_body is not None:
            check_max_request_body(self.max_request_body)
        if self.policy.resumable:
            raise PolicyError(
                "resumable= is a setting of @guard.once(…): only the arguments of a function can be stored"
            )
        if self.connection is not None and not self.required:
            raise PolicyError("connection= needs a key on every request: required=True")
        if self.connection is not None and self.stores(500):
            # A rolled back transaction undoes the record as well, so nothing would remember the outside effect.
            setting = "external_effects=True" if self.external_effects else 'guarantee="at_most_once"'
            raise PolicyError(
                f"connection= and {setting} exclude each other: a transaction that is rolled back leaves no record, "
                "so what the handler did outside the database would be done again. Leave connection= out to prevent "
                "that; or keep only connection= where the handler writes nothing but rows, which happen once by "
                'themselves (guarantee="effectively_once")'
            )
        for is_generator, manager in _GENERATORS:  # a dependency of FastAPI's, which yields a session
            if is_generator(self.connection):
                object.__setattr__(self, "connection", manager(self.connection))
        if self.connection_parameter is not None and self.connection is None:
            raise PolicyError("connection_parameter= needs connection=, which opens the connection")
        if self.include and self.exclude:
            raise PolicyError("name the fields to compare (include=) or those to leave out (exclude=), not both")
        select_fields({}, include=self.include or None, exclude=self.exclude or None)  # raises if one is no path

    @cached_property
    def replay_header_names(self) -> frozenset[bytes]:
        """``replay_headers`` as bytes, encoded once and not per request."""
        return frozenset(name.encode("latin-1") for name in self.replay_headers)

    @cached_property
    def replay_marker_name(self) -> bytes:
        """``replay_marker`` as bytes."""
        return self.replay_marker.encode("latin-1")

    @cached_property
    def reads_json(self) -> bool:
        return self.canonical_json or bool(self.include or self.exclude)

    @cached_property
    def reads_body(self) -> bool:
        """Whether the whole body is needed to compare requests."""
        return self.reads_json or self.compare_decompressed

    @cached_property
    def compares_bytes(self) -> bool:
        """Whether requests are compared by their bytes and the usual header lines alone."""
        return not (self.fingerprint_headers or self.reads_body or self.compare_parts)

    @cached_property
    def takes_bare_keys(self) -> bool:
        """Whether a bare key of any form is valid, unless it is too long."""
        return self.key_mode == "auto" and self.key_format.pattern is None

    @cached_property
    def claims_early(self) -> bool:
        """Whether a claim at the edge needs no more than the key, the tenant and the body."""
        return type(self) is Idempotent and self.connection is None

    def check_connection(self, *, awaited: bool) -> None:
        """Raise PolicyError if ``connection`` opens no connection, or one of the other kind.

        :param awaited: whether the service is async.
        """
        connect: object = self.connection
        if connect is None:
            return
        if not callable(connect):
            raise PolicyError(
                f"connection= is a function that opens a connection or session, such as engine.connect, not {connect!r}"
            )
        opens = inspect.unwrap(connect)
        name = getattr(opens, "__qualname__", repr(opens))
        if awaited and inspect.isgeneratorfunction(opens):
            raise PolicyError(
                f"connection={name} is a plain generator, and would block this async service: write it as an async def "
                "that yields an async session, or pass an async_sessionmaker"
            )
        if inspect.iscoroutinefunction(opens):
            raise PolicyError(
                f"connection={name} returns a coroutine: let it yield the session, or pass a sessionmaker"
            )
        if not awaited and inspect.isasyncgenfunction(opens):
            raise PolicyError(
                f"connection={name} is async, and this service is not: pass one that opens a sync session"
            )

    def stores(self, status: int) -> bool:
        """Whether an answer with this status is stored and replayed. Otherwise the key is free again."""
        if status in self.released:
            return False
        return status < 500 or self.external_effects or self.policy.guarantee == "at_most_once"

    def under(self, policy: Policy) -> Self:
        """Return this rule with the guard's policy filled in, unless the rule has a policy of its own."""
        effective = self.policy if self._has_own_policy else policy.replace(**dict(self.changes))
        if self.external_effects and effective.on_interrupted is None:
            # An interrupted handler may have had its effect, so an interruption is like a crash.
            effective = effective.replace(on_interrupted="abandon")
        return self if effective is self.policy else replace(self, policy=effective, changes=())

    @property
    def _has_own_policy(self) -> bool:
        return self.policy is not _GUARDS and not self.changes

    def with_settings(self, settings: Mapping[str, Any]) -> Self:
        """Return this rule with other settings, its own and those of its policy; PolicyError for an unknown one."""
        known = {each.name for each in fields(self)} - {"changes", "protect"}
        own = {name: each for name, each in settings.items() if name in known}
        policy = {name: each for name, each in settings.items() if name not in known}
        if unknown := policy.keys() - _POLICY:
            raise _unknown(unknown, (known | _POLICY) - {"resumable"})
        if isinstance(own.get("key_format"), str):
            own["key_format"] = KeyFormat.named(own["key_format"])
        if "policy" in own or self._has_own_policy:
            own["policy"] = own.get("policy", self.policy).replace(**policy)
            return replace(self, **{**own, "changes": ()})
        changes = {**dict(self.changes), **policy}
        return replace(self, **{**own, "policy": _GUARDS.replace(**changes), "changes": tuple(changes.items())})


@dataclass(frozen=True, kw_only=True)
class Conditional(Idempotent):
    """A route that changes a resource only in the version that the caller has read: If-Match, or 428.

    With a key as well, a retry of a change that was made gets the first answer instead of 412.
    """

    kind: ClassVar[str] = "conditional"
    decorator: ClassVar[str] = "conditional"

    required: bool = False
    precondition_required: bool = True
    """False: a request without If-Match or If-None-Match is accepted, and changes any version."""


@dataclass(frozen=True, kw_only=True)
class Natural(_Declaration):
    """A route whose repetition changes nothing, such as a PUT of a whole resource or a DELETE. It takes no key."""

    kind: ClassVar[str] = "natural"
    decorator: ClassVar[str] = "natural"

    absent: frozenset[int] = frozenset({404, 410})
    """Statuses of a DELETE that mean that the resource does not exist. They become 204: that is what was requested."""

    def settled(self, method: str, status: int) -> bool:
        """Whether the answer means that the requested state is reached already."""
        return method == "DELETE" and status in self.absent

    def with_settings(self, settings: Mapping[str, Any]) -> Self:
        """Return this rule with other settings; PolicyError for an unknown one."""
        if unknown := settings.keys() - {"absent"}:
            raise _unknown(unknown, {"absent"})
        return replace(self, **settings)


@dataclass(frozen=True)
class Exempt(_Declaration):
    """A route that is unprotected on purpose, and the reason: a search by POST, a log-in."""

    kind: ClassVar[str] = "exempt"
    decorator: ClassVar[str] = "exempt"

    reason: str

    def __post_init__(self) -> None:
        reason: object = self.reason
        if not isinstance(reason, str) or not reason.strip():
            raise PolicyError('exempt() needs a reason, for the reader of the code: @exempt("it only reads")')


Rule: TypeAlias = Idempotent | Natural | Exempt
"""Any rule that a route can be declared with."""


class Decorators:
    """``idempotent``, ``conditional``, ``natural`` and ``exempt`` of one framework.

    The settings are typed once, here. The module of each framework exports these methods as functions.
    """

    def __init__(self, protect: Protect) -> None:
        self._protect = protect

    def idempotent(self, base: Idempotent | None = None, /, **settings: Unpack[IdempotentSettings]) -> Idempotent:
        """Declare an endpoint that needs a key and runs once per key.

        Use it in ``routes=``, or to decorate an endpoint, below its route's decorator. GET, HEAD and OPTIONS of the
        same endpoint are not affected. A parameter annotated ``Operation`` (``AsyncOperation`` in an ``async def``)
        receives the handle of the operation, or None when no key was sent to a route where it is optional.

        :param base: a rule to start from; ``settings`` change it.
        :param settings: those of ``Idempotent``, and those of ``Policy`` that differ from the guard's.
        """
        return _base(Idempotent, base, self._protect).with_settings(settings)

    def conditional(self, base: Conditional | None = None, /, **settings: Unpack[ConditionalSettings]) -> Conditional:
        """Declare an endpoint that changes only the version that the caller has read (If-Match): see ``check_match``.

        Same parameters as ``idempotent``, and ``precondition_required``.
        """
        return _base(Conditional, base, self._protect).with_settings(settings)

    def natural(self, base: Natural | None = None, /, **settings: Unpack[NaturalSettings]) -> Natural:
        """Declare an endpoint whose repetition changes nothing: a PUT of a whole resource, a DELETE. It takes no key.

        :param absent: statuses by which a DELETE reports that the resource does not exist; they become 204.
        """
        return _base(Natural, base, self._protect).with_settings(settings)

    def exempt(self, reason: str) -> Exempt:
        """Declare that an endpoint is unprotected on purpose, so that the start-up report does not name it."""
        return Exempt(reason, protect=self._protect)


_plain = Decorators(_no_framework)
idempotent, conditional, natural, exempt = _plain.idempotent, _plain.conditional, _plain.natural, _plain.exempt


def check_max_request_body(longest: object) -> None:
    """Raise PolicyError unless it is a number of bytes."""
    if type(longest) is not int or longest < 0:
        raise PolicyError(f"max_request_body is a number of bytes, 0 or more, not {longest!r}")


def _is_decorated(endpoint: Any) -> bool:
    """Whether a decorator has wrapped the function."""
    if isinstance(endpoint, partial):  # Django's method_decorator() decorates a partial of the method
        endpoint = getattr(endpoint.func, "__func__", endpoint.func)
    return hasattr(endpoint, "__wrapped__")


def is_header_name(name: object) -> TypeGuard[str]:
    """Whether this can be the name of a header (RFC 9110, 5.1)."""
    return isinstance(name, str) and _TOKEN.fullmatch(name) is not None


def _header_name(name: object) -> str:
    if not is_header_name(name):
        raise PolicyError(f'replay_headers and replay_marker are names of headers, such as "etag", not {name!r}')
    return name.lower()


R = TypeVar("R", Idempotent, Conditional, Natural)


def _base(cls: type[R], base: object, protect: Protect) -> R:
    """Return the rule to start from. Raises PolicyError if it is of another class, or is the endpoint itself."""
    if base is None:
        return cls(protect=protect)
    if isinstance(base, cls):
        return replace(base, protect=protect)
    name = cls.decorator
    if callable(base) and not isinstance(base, (type, _Declaration)):
        raise PolicyError(f"write @{name}(), with the brackets")
    other = f"{base.decorator}()" if isinstance(base, _Declaration) else repr(base)
    raise PolicyError(f"{name}() starts from another {name}(), not from {other}")


def _unknown(unknown: set[str], known: set[str]) -> PolicyError:
    return PolicyError(f"unknown setting {', '.join(sorted(unknown))}; there are: {', '.join(sorted(known))}")
