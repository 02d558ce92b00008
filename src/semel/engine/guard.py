"""The base of the sync and the async guard: it checks the settings and makes the ``Call`` objects of the core."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from time import monotonic
from typing import Any, ClassVar, Final, TypedDict

from semel.codec import Codec
from semel.core.call import Call
from semel.core.encoding.fingerprint import Arguments, hash_key
from semel.core.encoding.plain import PLAIN
from semel.core.encoding.serializers import ResultSerializer, cached_serializer
from semel.core.encoding.snapshot import NotSerializable, outcome_kind
from semel.core.keys import KeyFormat, check_name, identity, identity_hash, normalize_key
from semel.core.lineage import lineage_lines, read_label
from semel.core.ops import Listing, ListRecords, Measure, Record, Resolve
from semel.core.policy import (
    Duration,
    Guarantee,
    OnAbandoned,
    OnInterrupted,
    OnStoreError,
    OnUnstored,
    Policy,
    Remember,
    at_least_one,
    seconds,
)
from semel.core.quota import Meter, Quota
from semel.core.states import State
from semel.engine.declare.declaration import Declaration
from semel.engine.forking import survive_forks
from semel.engine.operation.handle import running, set_lineage
from semel.engine.ports import STORE_MEMBERS, AsyncStore, Store, check_awaited, has_members
from semel.engine.problem_log import ProblemLog
from semel.errors import ConfigurationError, NotResolvable, PolicyError
from semel.observe import events
from semel.observe.events import Event, EventHook, EventHooks, LoggingHook, TracingHook, call_hooks, hooks_of

ANY: Final = KeyFormat.named("any")
REMEMBERED: Final = 256
"""The size of each cache of operation names, tenants and changed policies. A program may make up names as it runs."""
check_operation: Final = lru_cache(maxsize=REMEMBERED)(partial(check_name, "an operation"))
"""Raises PolicyError if this is no name of an operation."""


class ListFilters(TypedDict, total=False):
    """Which records to list, as keywords."""

    states: Sequence[State]
    operation: str | None
    tenant: str | None
    older: Duration


class PolicyChanges(TypedDict, total=False):
    """Per-operation changes to the guard's policy, as keywords. See ``Policy``."""

    guarantee: Guarantee
    lease: Duration
    max_run_time: Duration | None
    ttl: Duration | None
    reject_expired_for: Duration | None
    on_duplicate: Any  # "raise" | Wait, spelled loosely so that a literal needs no cast
    on_abandoned: OnAbandoned | None
    recover: Callable[..., Any] | None
    on_interrupted: OnInterrupted | None
    on_store_error: OnStoreError | None
    on_unstored: OnUnstored
    remember_errors: Remember | None
    completion_timeout: Duration
    resumable: bool


class Guard:
    """The base of ``SyncGuard`` and ``AsyncGuard``, from which ``Semel`` and ``AsyncSemel`` derive."""

    AWAITED: ClassVar[bool]
    """Whether its methods are awaited."""
    store: Store | AsyncStore

    def __init__(
        self,
        *,
        policy: Policy | None = None,
        tenant: str = "",
        on_event: EventHooks | None = None,
        codec: Codec | None = None,
        secret: bytes | None = None,
        readable_keys: bool = True,
        sweep_every: Duration | None = "10m",
        quota: Quota | None = None,
    ) -> None:
        self._settings: dict[str, Any] = {
            "policy": policy, "tenant": tenant, "on_event": on_event, "codec": codec, "secret": secret,
            "readable_keys": readable_keys, "quota": quota,
        }  # fmt: skip
        _check_kind("policy", policy, Policy, 'Policy(ttl="7d")')
        _check_kind("codec", codec, Codec, "Codec(cipher=KeyRing(…))")
        _check_kind("secret", secret, bytes, "bytes, secrets.token_bytes(32),")
        _check_kind("quota", quota, Quota, "Quota(live_keys=10_000)")
        self._policy = policy or Policy()
        self.tenant = tenant and checked_tenant(tenant)
        self._log: ProblemLog | None = ProblemLog()
        self._hook: EventHook | None = None
        self._trace: Callable[[], bytes] | None = None
        self._set_hooks(hooks_of(on_event))
        self.codec = codec or Codec()
        self.secret = secret
        self._data = Arguments(lambda fingerprint: None, "all", secret=secret)
        self._parameters = Arguments(lambda parameters: None, "auto", secret=secret)
        self.readable_keys = readable_keys
        self._identity_hash = identity_hash(b"" if readable_keys else hash_key(secret))
        self.sweep_every = None if sweep_every is None else seconds(sweep_every, "sweep_every")
        self._nonces = random.Random()
        """Seeded by the system, and again in a forked child, which must not repeat the nonces of its parent."""
        survive_forks(self._nonces.seed)
        self.tenants: dict[str, str] = {}
        """Tenants that have been checked, as they are stored. Cleared when there are many."""
        self._policies: dict[tuple[tuple[str, Any], ...], Policy] = {}
        if self._policy.resumable:
            raise PolicyError(
                "resumable= is a setting of @guard.once(…): only the arguments of a function can be stored"
            )
        self.resumable: dict[str, Declaration] = {}
        """Functions that a resumer may run, by the names of their operations."""
        self.quota = quota
        self._meter = None if quota is None else Meter(quota, monotonic)

    @property
    def policy(self) -> Policy:
        """The default policy of its operations."""
        return self._policy

    def add_event_hook(self, hook: EventHook) -> None:
        """Add a hook that is called with every event, after the existing ones."""
        self._set_hooks((*self._settings["on_event"], *hooks_of(hook)))

    def _set_hooks(self, hooks: tuple[EventHook, ...]) -> None:
        self._settings["on_event"] = hooks
        self._hook = call_hooks(hooks, "semel")
        if any(isinstance(hook, LoggingHook) for hook in hooks):
            self._log = None
        self._trace = next((hook.trace for hook in hooks if isinstance(hook, TracingHook)), None)

    def declared_call(self, declared: Declaration, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
        """Return the call of a decorated function with these arguments."""
        key = normalize_key(declared.key(args, kwargs), declared.key_format)
        tenant = self.tenant if declared.tenant is None else checked_tenant(declared.tenant(args, kwargs))
        digest = declared.digest(args, kwargs)
        call = self.make_call(declared.operation, key, tenant, digest, declared.policy, declared.serializer)
        call.input = declared.input(args, kwargs)
        call.comparison = declared.comparison
        return call

    def _plain_call(
        self,
        operation: str,
        key: object,
        tenant: str | None,
        fingerprint: Any,
        returns: Any,
        changes: Mapping[str, Any],
    ) -> Call:
        check_operation(operation)
        call = self.make_call(
            operation,
            normalize_key(key, ANY),
            self.tenant if tenant is None else checked_tenant(tenant),
            b"" if fingerprint is None else self._data.digest((fingerprint,), {}),
            self._changed_policy(changes) if changes else self._policy,
            PLAIN if returns is None else cached_serializer(returns),
        )
        call.comparison = "the same data. Compared: what is passed as fingerprint="
        return call

    def _statement_call(
        self,
        operation: str,
        key: object,
        tenant: str | None,
        parameters: Any,
        fingerprint: Any,
        changes: Mapping[str, Any],
    ) -> Call:
        if not isinstance(parameters, (Mapping, Sequence)) or isinstance(parameters, (str, bytes)):
            raise ConfigurationError(f"parameters= is a list or a dict, not a {type(parameters).__name__}")
        automatic = isinstance(fingerprint, str) and fingerprint == "auto"
        call = self._plain_call(operation, key, tenant, None if automatic else fingerprint, None, changes)
        if automatic and parameters:
            call.fingerprint = self._parameters.digest((parameters,), {})
        return call

    def make_call(
        self,
        operation: str,
        key: str,
        tenant: str,
        fingerprint: bytes,
        policy: Policy,
        serializer: ResultSerializer = PLAIN,
    ) -> Call:
        """Return a call with this guard's settings. For adapters, which must have checked the arguments."""
        call = Call(
            identity(tenant, operation, key, self._identity_hash),
            tenant,
            operation,
            key,
            key if self.readable_keys else None,
            fingerprint,
            self._nonces.getrandbits(63),
            policy,
            serializer,
            self.codec,
            self._hook,
            self._meter,
            self._log,
        )
        if self._hook is not None:
            call.clock, call.began = monotonic, monotonic()
            if self._trace is not None:
                call.trace = self._trace()
        outer = running.get()
        if outer is not None:
            set_lineage(call, lineage_lines(outer._next_lineage))
        return call

    def check_tenant(self, tenant: str) -> str:
        """Return the tenant of an adapter's request, and remember it. Raises PolicyError or KeyInvalid."""
        checked = checked_tenant(tenant)
        if type(tenant) is str:
            if len(self.tenants) >= REMEMBERED:
                self.tenants.clear()
            self.tenants[tenant] = checked
        return checked

    def _changed_policy(self, changes: Mapping[str, Any]) -> Policy:
        try:
            cache_key = tuple(changes.items())
            known = self._policies.get(cache_key)
            if known is None:
                if len(self._policies) >= REMEMBERED:
                    self._policies.clear()
                known = self._policies[cache_key] = self._policy.replace(**changes)
            if known.resumable:
                raise PolicyError("resumable= is for functions, whose arguments can be stored: @guard.once(…)")
            return known
        except TypeError:  # an unhashable value, which no policy allows: replace() raises and names it
            return self._policy.replace(**changes)

    def _identity(self, operation: str, key: object, tenant: str | None) -> bytes:
        owner = self.tenant if tenant is None else checked_tenant(tenant)
        return identity(owner, operation, normalize_key(key, ANY), self._identity_hash)

    def _resolution(self, call: Call, result: Any, expected: Record | None) -> Resolve:
        _check_expected(call, expected)
        try:
            op = Resolve(call.id, call.seal_value(result), call.policy.retention_seconds)
        except NotSerializable as error:
            raise PolicyError(f"{call}: this result cannot be stored, so nothing is resolved: {error}") from error
        return op if expected is None else replace(op, token=expected.token, states=(expected.state,))

    def _release_op(self, call: Call, force: bool, outcome: tuple[str, int] | None, expected: Record | None) -> Resolve:
        """Return the Op that releases the record.

        :param outcome: what ``_releasable`` returned, if a finished record may be released.
        """
        _check_expected(call, expected)
        token = None if outcome is None else outcome[1]
        states: tuple[State, ...] = ()
        if expected is not None:
            states = (expected.state,)
            # With a token the Op would free what is done. Without one it changes nothing, and the answer says why.
            token = expected.token if outcome is not None or expected.state is not State.DONE else None
        return Resolve(call.id, None, call.policy.retention_seconds, force, token, states)

    def _list_op(self, filters: ListFilters, limit: int, look: int, after: str | None) -> ListRecords:
        self._require_lists()
        return ListRecords(
            tuple(filters.get("states", ())), filters.get("operation"), filters.get("tenant"),
            seconds(filters.get("older", 0.0), "older"), at_least_one(limit, "limit"), at_least_one(look, "look"),
            after,
        )  # fmt: skip

    def _measure_op(self) -> Measure:
        self._require_lists()
        return Measure()

    def _require_lists(self) -> None:
        if not self.store.lists:
            raise ConfigurationError(f"{type(self.store).__name__} cannot list its records: use another store")

    def _releasable(self, call: Call, record: Record | None, stored: str) -> tuple[str, int] | None:
        """Return what is stored (see ``events.OutcomeReleased``) and its token, or None if the operation is not done.

        Raises NotResolvable if it must stay.
        """
        if stored not in ("failure", "any"):
            raise PolicyError(f'stored= is "failure" or "any", not {stored!r}')
        if record is None or record.state is not State.DONE:
            return None
        kind = outcome_kind(self.codec, record.snapshot or b"", record.id)
        if stored == "failure" and kind != "failure":
            what = "its stored outcome cannot be read" if kind == "unreadable" else "what is stored is a result"
            raise NotResolvable(
                f"{call} is done, and {what}. To release it all the same, so that it runs again, write "
                'stored="any" (on the command line: --stored any)'
            )
        return kind, record.token

    def _report(
        self,
        call: Call,
        found: State,
        *,
        happened: bool,
        force: bool = False,
        outcome: tuple[str, int] | None = None,
        expected: Record | None = None,
    ) -> None:
        """Report a resolution. Raises NotResolvable if nothing was changed."""
        if expected is not None and found is not expected.state:
            now = "it has another token, or is gone" if found is State.ABSENT else f"it is {found.name.lower()} now"
            raise NotResolvable(f"{call} has changed since it was looked up: {now}. Look it up again")
        if found in (State.UNKNOWN, State.ABANDONED) or (force and found is State.RUNNING):
            call.alert(events.Resolved, happened)
        elif outcome is not None and found is State.DONE:
            call.alert(events.OutcomeReleased, *outcome)
        elif outcome is not None:
            raise NotResolvable(f"{call}: somebody else has just released it, or it has expired. Look it up again")
        elif found is State.RUNNING:
            raise NotResolvable(
                f"{call} is running; wait for its lease to end, or release(force=True) (on the command line: --force)"
            )
        elif found is State.DONE:
            raise NotResolvable(
                f"{call} is done, so its outcome stays until it expires. To release a stored failure, write "
                'release(…, stored="failure") (on the command line: --stored failure)'
            )
        else:
            raise NotResolvable(f"{call}: there is no such record")

    def emit(self, event: Event) -> None:
        """Report an event of a resumer to the guard's log and to the hooks."""
        if self._log is not None:
            self._log.report(event)
        if self._hook is not None:
            self._hook(event)

    def _report_sweep(self, removed: int, unknown: int) -> None:
        if self._hook is not None:
            self._hook(events.SweptEvent("", "", "", removed, unknown))


def readable(listing: Listing) -> Listing:
    """Return the page with key, root and parent of each record apart."""
    return replace(listing, records=tuple(map(read_label, listing.records)))


def _check_expected(call: Call, expected: Record | None) -> None:
    """Raise PolicyError if the record that a caller expects belongs to another call."""
    if expected is not None and expected.id != call.id:
        raise PolicyError(
            "expected= is the record of another operation, key or tenant, or of a guard with another secret"
        )


def checked_tenant(value: object) -> str:
    """Return the tenant. Raises PolicyError if there is none, and KeyInvalid if it is malformed."""
    if value is None or value == "":
        raise PolicyError(f"tenant= returned {value!r}: every call needs a tenant, or leave tenant= out")
    return normalize_key(value, ANY)


def check_store(store: Any, quota: Quota | None, *, awaited: bool) -> Any:
    """Return the store. Raises ConfigurationError if a guard cannot use it, instead of failing at the first call."""
    if not has_members(store, STORE_MEMBERS):
        raise ConfigurationError(
            "a guard takes a store, such as SQLiteStore('app.db'), or its URL, 'sqlite:///app.db', "
            f"not {_describe_wrong_store(store)}"
        )
    check_awaited(store, "Semel", awaited=awaited)
    if quota is not None and not store.counts:
        raise ConfigurationError(
            f"quota= needs a store that counts keys, and {type(store).__name__} does not: use another"
        )
    return store


def _describe_wrong_store(store: object) -> str:
    if isinstance(store, str):
        return "another string"  # never quote it: it may be a URL with a password
    missing = [name for name in STORE_MEMBERS if not hasattr(store, name)]
    if len(missing) == len(STORE_MEMBERS):
        return repr(store)
    return f"{type(store).__name__}, which does not declare {', '.join(missing)}"


def _check_kind(name: str, setting: object, expected: type, example: str) -> None:
    if setting is not None and not isinstance(setting, expected):
        raise ConfigurationError(f"{name}= is {example} or the like, not {type(setting).__name__}")
