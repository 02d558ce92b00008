# Twin: sync.py is generated from this file by make twins.
# Twin: AsyncGuard -> SyncGuard
# Twin: over an async store -> over a sync store
# Twin: runs a plain ``def`` in a thread; calls are awaited -> also takes coroutine functions; its store runs in threads
# Twin: ``async with guard:`` does so -> ``with guard:`` does so
# Twin: AWAITED: ClassVar[bool] = True -> AWAITED: ClassVar[bool] = False
"""``AsyncGuard``: everything that ``AsyncSemel`` does, over an async store.

A guard makes a ``Call`` for each call of the program, and passes it to its driver (``engine/drive``) or to a
transaction (``engine/transaction``).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from types import TracebackType

# sync only: from typing import TYPE_CHECKING
from typing import Any, ClassVar, Final, Literal, ParamSpec, Self, TypeVar, Unpack, cast, overload

from semel.codec import Codec
from semel.core.call import Call, Outcome
from semel.core.encoding.serializers import Serializer
from semel.core.keys import KeyFormat
from semel.core.lineage import read_label
from semel.core.ops import Listing, Lookup, Record, Size, Sweep, Swept
from semel.core.policy import Duration, Policy, at_least_one
from semel.core.quota import Quota
from semel.core.transactional import SQLEffect, StatementResult
from semel.engine.declare.declaration import AsyncOnce, Declaration, Selector, requires_brackets
from semel.engine.declare.handlers import with_handle
from semel.engine.drive.aio_driver import AsyncCallDriver
from semel.engine.drive.aio_rounds import SWEEP_LIMIT
from semel.engine.drive.attempts import AsyncAttempt
from semel.engine.drive.waiting import run_in_thread
from semel.engine.guard import Guard, ListFilters, PolicyChanges, check_store, readable
from semel.engine.operation import AsyncOperation, running
from semel.engine.ports import AsyncStore
from semel.engine.transaction.aio import AsyncTransactionAttempt
from semel.engine.transaction.rules import TRIES, check_tries, connection_parameter, pick_connection, refuse_nesting
from semel.errors import ConfigurationError, PolicyError
from semel.observe import events

# sync only: if TYPE_CHECKING:
# sync only:     from semel.engine.threaded import LoopGuards, ThreadedGuard
P = ParamSpec("P")
T = TypeVar("T")
LIST_PAGE: Final = 500
"""How many records ``list`` asks for at a time."""


class AsyncGuard(Guard):
    """Runs functions once per key, however often they are called."""

    AWAITED: ClassVar[bool] = True

    def __init__(
        self,
        store: AsyncStore | str,
        *,
        policy: Policy | None = None,
        tenant: str = "",
        on_event: events.EventHooks | None = None,
        codec: Codec | None = None,
        secret: bytes | None = None,
        readable_keys: bool = True,
        sweep_every: Duration | None = "10m",
        quota: Quota | None = None,
    ) -> None:
        """
        :param store: the store, or its URL, such as ``"sqlite:///app.db"``. It is closed with the guard.
        :param policy: the default policy. An operation can change it with keywords.
        :param tenant: the tenant of calls that name none.
        :param on_event: a hook, or a list of hooks, called with every event of ``semel.observe.events``.
        :param codec: compression and encryption of the stored results.
        :param secret: makes fingerprints unguessable (a MAC instead of a hash).
        :param readable_keys: False stores only hashes of keys, which are keyed with ``secret``.
        :param sweep_every: how often expired records are removed in the background; None to never do so.
        :param quota: how many live keys each tenant may have.
        """
        super().__init__(
            policy=policy, tenant=tenant, on_event=on_event, codec=codec, secret=secret,
            readable_keys=readable_keys, sweep_every=sweep_every, quota=quota,
        )  # fmt: skip
        # sync only: self._loop_guards: LoopGuards | None = None
        self.use_store(self._open_store(store) if isinstance(store, str) else store)

    def use_store(self, store: AsyncStore) -> None:
        """Use another store from now on, in tests for example. The store of before is not closed."""
        check_store(store, self.quota, awaited=self.AWAITED)
        self.store: AsyncStore = store
        self._start()

    def _start(self) -> None:
        self._closed = False
        # sync only: if self._loop_guards is not None:
        # sync only:     self._loop_guards.restart(self.store)
        self.driver = AsyncCallDriver(self.store, self.sweep_every, self._report_sweep)
        self.begin: Callable[[Call], Awaitable[AsyncAttempt | Outcome[Any]]] = self.driver.drive
        """For adapters: claim the key of a call. Returns an outcome, or an attempt that the adapter must end."""

    def _open_store(self, url: str) -> AsyncStore:
        """Open a store by its URL. The engine knows no stores; ``AsyncSemel`` does."""
        raise ConfigurationError("a guard of the engine takes a store: AsyncSemel opens one by its URL")

    # -- functions

    @requires_brackets
    def once(
        self,
        *,
        key: Selector,
        operation: str | None = None,
        tenant: Selector | None = None,
        fingerprint: Any = "auto",
        exclude: tuple[str, ...] = (),
        key_format: KeyFormat | str = "any",
        serializer: Serializer | None = None,
        **changes: Unpack[PolicyChanges],
    ) -> AsyncOnce:
        """Decorate a function so that it runs once per key. Further calls with the same key get the stored result.

        ``AsyncSemel`` runs a plain ``def`` in a thread; calls are awaited.

        :param key: a parameter's name (``"order_id"``, ``"order.id"``) or a function of some of the arguments.
        :param operation: the name that scopes the key; defaults to the function's qualified name.
        :param tenant: like ``key``; defaults to the guard's own tenant.
        :param fingerprint: the arguments that a retry must repeat: ``"auto"`` (all that are plain data), ``"all"``,
            names, a function, or None.
        :param exclude: parameters that may differ between retries.
        :param serializer: how the result is stored; defaults to one for the return annotation.
        """

        def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
            declared = Declaration(
                function, operation=operation, key=key, tenant=tenant, fingerprint=fingerprint, exclude=exclude,
                key_format=key_format, serializer=serializer, policy=self._policy.replace(**changes),
                secret=self.secret, awaited=self.AWAITED,
            )  # fmt: skip
            if declared.inputs is not None:
                self.resumable[declared.operation] = declared
            # sync only: if inspect.iscoroutinefunction(function):
            # sync only:     return self._in_loops().protect(declared)
            # sync only: if inspect.iscoroutinefunction(changes.get("recover")):
            # sync only:     raise PolicyError("recover= is async and the function is not: make both async, or neither")

            @functools.wraps(function)
            async def once(*args: Any, **kwargs: Any) -> Any:
                return (await self.perform(declared, args, kwargs)).value

            return once

        return cast("AsyncOnce", decorate)

    @overload
    async def run(
        self,
        operation: str,
        *,
        key: object,
        call: Callable[[], Awaitable[T]],
        tenant: str | None = None,
        fingerprint: Any = None,
        returns: Any = None,
        **changes: Unpack[PolicyChanges],
    ) -> T: ...

    @overload
    async def run(
        self,
        operation: str,
        *,
        key: object,
        call: Callable[[AsyncOperation], Awaitable[T]],
        tenant: str | None = None,
        fingerprint: Any = None,
        returns: Any = None,
        **changes: Unpack[PolicyChanges],
    ) -> T: ...

    async def run(
        self,
        operation: str,
        *,
        key: object,
        call: Callable[[], Awaitable[T]] | Callable[[AsyncOperation], Awaitable[T]],
        tenant: str | None = None,
        fingerprint: Any = None,
        returns: Any = None,
        **changes: Unpack[PolicyChanges],
    ) -> T:
        """Call a function once, without a decorator: ``guard.run("ship", key=order.id, call=lambda: ship(order))``.

        :param call: a function without arguments, or one that takes the operation's handle: ``lambda op: ship(order,
            op)``.
        :param fingerprint: plain data that a retry must repeat. Other data with the same key raises KeyReused.
        :param returns: the type of the result, if it is a dataclass or model.
        """
        handler = with_handle(call)
        what = self._plain_call(operation, key, tenant, fingerprint, returns, changes)
        outcome: Outcome[T] = await self.driver.drive(what, handler, what.policy.recover)
        return outcome.value

    @overload
    async def run_outcome(
        self,
        operation: str,
        *,
        key: object,
        call: Callable[[], Awaitable[T]],
        tenant: str | None = None,
        fingerprint: Any = None,
        returns: Any = None,
        **changes: Unpack[PolicyChanges],
    ) -> Outcome[T]: ...

    @overload
    async def run_outcome(
        self,
        operation: str,
        *,
        key: object,
        call: Callable[[AsyncOperation], Awaitable[T]],
        tenant: str | None = None,
        fingerprint: Any = None,
        returns: Any = None,
        **changes: Unpack[PolicyChanges],
    ) -> Outcome[T]: ...

    async def run_outcome(
        self,
        operation: str,
        *,
        key: object,
        call: Callable[[], Awaitable[T]] | Callable[[AsyncOperation], Awaitable[T]],
        tenant: str | None = None,
        fingerprint: Any = None,
        returns: Any = None,
        **changes: Unpack[PolicyChanges],
    ) -> Outcome[T]:
        """Like ``run``, but return an ``Outcome``, which says if the result is a replay."""
        handler = with_handle(call)
        what = self._plain_call(operation, key, tenant, fingerprint, returns, changes)
        outcome: Outcome[T] = await self.driver.drive(what, handler, what.policy.recover)
        return outcome

    # -- functions in a transaction

    async def run_in_transaction(
        self,
        connection: object,
        operation: str,
        *,
        key: object,
        call: Callable[[AsyncOperation], Awaitable[T]] | Callable[[], Awaitable[T]],
        tenant: str | None = None,
        fingerprint: Any = None,
        returns: Any = None,
        own_transaction: bool = False,
        tries: int | None = None,
        **changes: Unpack[PolicyChanges],
    ) -> T:
        """Call a function once and write its record in the transaction of ``connection``: both commit, or neither.

        :param connection: the connection or session that ``call`` uses, to the database of the guard's store. Its
            transaction is open, and you commit it.
        :param call: a function without arguments, or one that takes the operation's handle.
        :param own_transaction: open and commit the transaction here, and run ``call`` again after a conflict.
        :param tries: the maximum number of runs of ``call`` with ``own_transaction``; defaults to 10.
        """
        what = self._plain_call(operation, key, tenant, fingerprint, returns, changes)
        outcome: Outcome[T] = await self._transact(connection, what, with_handle(call), own_transaction, tries)
        return outcome.value

    async def run_in_transaction_outcome(
        self,
        connection: object,
        operation: str,
        *,
        key: object,
        call: Callable[[AsyncOperation], Awaitable[T]] | Callable[[], Awaitable[T]],
        tenant: str | None = None,
        fingerprint: Any = None,
        returns: Any = None,
        own_transaction: bool = False,
        tries: int | None = None,
        **changes: Unpack[PolicyChanges],
    ) -> Outcome[T]:
        """Like ``run_in_transaction``, but return an ``Outcome``, which says if the result is a replay."""
        what = self._plain_call(operation, key, tenant, fingerprint, returns, changes)
        return await self._transact(connection, what, with_handle(call), own_transaction, tries)

    async def execute_once(
        self,
        connection: object,
        operation: str,
        *,
        key: object,
        statement: str,
        parameters: Sequence[Any] | Mapping[str, Any] = (),
        tenant: str | None = None,
        fingerprint: Any = "auto",
        **changes: Unpack[PolicyChanges],
    ) -> StatementResult:
        """Run one SQL statement once, and write its record with it: both are stored, or neither.

        On PostgreSQL both are one statement and one round trip, so this is faster than a transaction. If a transaction
        is open on ``connection``, they become part of it, and you commit it; otherwise they are committed here.

        :param connection: any connection or session that ``run_in_transaction`` accepts.
        :param statement: an INSERT, UPDATE or DELETE, or a SELECT of a function that has the effect.
        :param parameters: a list or a dict, in the style of the connection's driver: ``%s`` (psycopg, MySQL, Django),
            ``$1`` (asyncpg), ``?`` (SQLite), ``:name`` (SQLAlchemy).
        :param fingerprint: what a retry must repeat; defaults to the parameters, as far as they are plain data. None to
            compare nothing.
        """
        call = self._statement_call(operation, key, tenant, parameters, fingerprint, changes)
        effect = SQLEffect(statement, parameters)
        attempt = AsyncTransactionAttempt(self.store, connection, call, False, TRIES, effect)
        if running.get() is not None:
            refuse_nesting(call)
        return await attempt.run_statement(effect)

    @requires_brackets
    def once_in_transaction(
        self,
        *,
        connection: Selector,
        key: Selector,
        operation: str | None = None,
        tenant: Selector | None = None,
        fingerprint: Any = "auto",
        exclude: tuple[str, ...] = (),
        key_format: KeyFormat | str = "any",
        serializer: Serializer | None = None,
        own_transaction: bool = False,
        tries: int | None = None,
        **changes: Unpack[PolicyChanges],
    ) -> Callable[[Callable[P, Coroutine[Any, Any, T]]], Callable[P, Coroutine[Any, Any, T]]]:
        """Decorate a function that takes a connection or session: ``@guard.once_in_transaction(connection="session")``.

        The other parameters are those of ``once`` and ``run_in_transaction``.

        :param connection: the name of the connection's parameter, or a function of the arguments that returns it.
        """

        def decorate(function: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, Coroutine[Any, Any, T]]:
            # sync: if inspect.iscoroutinefunction(function):
            # sync:     raise PolicyError(f"{function.__qualname__} is async: decorate it with an AsyncSemel")
            if not inspect.iscoroutinefunction(function):
                raise PolicyError(f"{getattr(function, '__qualname__', function)} is sync: decorate it with a Semel")
            check_tries(own_transaction, tries)
            declared = Declaration(
                function, operation=operation, key=key, tenant=tenant, fingerprint=fingerprint,
                exclude=(*exclude, *connection_parameter(connection)), key_format=key_format, serializer=serializer,
                policy=self._policy.replace(**changes), secret=self.secret, awaited=self.AWAITED,
            )  # fmt: skip
            pick = pick_connection(declared, connection)

            @functools.wraps(function)
            async def once(*args: P.args, **kwargs: P.kwargs) -> T:
                recover = declared.recover
                outcome: Outcome[T] = await self._transact(
                    pick(args, kwargs), self.declared_call(declared, args, kwargs),
                    lambda op: declared.invoke(op, args, kwargs), own_transaction, tries,
                    recover and (lambda: recover(args, kwargs)),
                )  # fmt: skip
                return outcome.value

            return once

        return decorate

    def _transact(
        self,
        connection: object,
        call: Call,
        handler: Callable[[AsyncOperation], Any],
        own: bool,
        tries: int | None,
        recover: Callable[[], Any] | None = None,
    ) -> Awaitable[Outcome[Any]]:
        most = TRIES if tries is None else check_tries(own, tries)
        attempt = AsyncTransactionAttempt(self.store, connection, call, own, most)
        if running.get() is not None:
            refuse_nesting(call)
        outcome: Awaitable[Outcome[Any]] = attempt.run(handler, recover)
        return outcome

    # -- records

    async def lookup(self, operation: str, key: object, *, tenant: str | None = None) -> Record | None:
        """Return the record of an operation as it is stored, or None."""
        record = await self.store.execute(Lookup(self._identity(operation, key, tenant)))
        return None if record is None else read_label(record)

    async def resolve(
        self,
        operation: str,
        key: object,
        result: Any,
        *,
        tenant: str | None = None,
        returns: Any = None,
        expected: Record | None = None,
    ) -> None:
        """Declare that an unknown or abandoned operation did happen, with this result; later calls replay it.

        :param expected: the record that ``lookup`` returned. If its token or its state is another one by now, nothing
            is changed, and NotResolvable is raised.
        """
        call = self._plain_call(operation, key, tenant, None, returns, {})
        found = await self.store.execute(self._resolution(call, result, expected))
        self._report(call, found, happened=True, expected=expected)

    async def release(
        self,
        operation: str,
        key: object,
        *,
        tenant: str | None = None,
        force: bool = False,
        stored: Literal["failure", "any"] | None = None,
        expected: Record | None = None,
    ) -> None:
        """Declare that an unknown or abandoned operation did not happen: the next call is a first call.

        :param force: release it even if its handler is still running. That handler's result will not be stored.
        :param stored: release it even if it is done, so that it runs again: ``"failure"`` if what is stored is an error
            or a response with a status from 400, ``"any"`` whatever is stored.
        :param expected: the record that ``lookup`` returned. If its token or its state is another one by now, nothing
            is changed, and NotResolvable is raised.
        """
        call = self._plain_call(operation, key, tenant, None, None, {})
        outcome = None
        if stored is not None:
            outcome = self._releasable(call, await self.store.execute(Lookup(call.id)), stored)
        found = await self.store.execute(self._release_op(call, force, outcome, expected))
        self._report(call, found, happened=False, force=force, outcome=outcome, expected=expected)

    async def sweep(self, limit: int = SWEEP_LIMIT) -> Swept:
        """Remove at most ``limit`` expired records."""
        swept = await self.store.execute(Sweep(at_least_one(limit, "limit")))
        self._report_sweep(swept.removed, swept.unknown)
        return swept

    async def list_page(
        self, *, limit: int = 50, look: int = 5000, after: str | None = None, **filters: Unpack[ListFilters]
    ) -> Listing:
        """Return a page of the store's records, of all operations and tenants unless ``filters`` say otherwise.

        The newest come first in SQL stores and in memory; elsewhere there is no order. Snapshots are left out. All
        pages together show each record that was there from the first page to the last. Redis may show one twice.

        :param limit: maximum number of records on the page.
        :param look: maximum number of records that the store looks at. If few of them match, a page may be empty
            although others follow.
        :param after: ``Listing.after`` of the page before. It is None on the last page.
        :param filters: ``states`` (a list of ``State``), ``operation``, ``tenant`` ("" for records without one), and
            ``older``: how long ago the first attempt was claimed, at least.
        """
        return readable(await self.store.execute(self._list_op(filters, limit, look, after)))

    async def list(self, **filters: Unpack[ListFilters]) -> AsyncIterator[Record]:
        """Iterate over the store's records, page by page. The parameters are the filters of ``list_page``."""
        after: str | None = None
        while True:
            page = await self.list_page(limit=LIST_PAGE, after=after, **filters)
            # sync: yield from page.records
            for record in page.records:
                yield record
            after = page.after
            if after is None:
                return

    async def measure(self) -> Size:
        """Return how many records the store has, how much room they take, and how long expired ones wait for a sweep.

        The numbers come from the server's statistics. No table is counted for them.
        """
        return await self.store.execute(self._measure_op())

    async def check(self) -> None:
        """Raise unless the store can be used: NotMigrated if it lacks its tables, StoreUnavailable if it is away.

        The ASGI middleware does so when an application starts.
        """
        await self.store.execute(Lookup(bytes(16)))

    def open(self) -> None:
        """Make the guard usable again after ``close``, together with its store. Does nothing while it is open.

        ``async with guard:`` does so, and the middleware when an application starts.
        """
        if self._closed:
            self.store.open()
            self._start()

    async def close(self) -> None:
        """Stop renewing and sweeping, and close the store. ``open`` makes the guard usable again."""
        self._closed = True
        await self.driver.keeper.close()
        # sync only: if self._loop_guards is not None:
        # sync only:     self._loop_guards.close()
        await self.store.close()

    async def __aenter__(self) -> Self:
        self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # -- for adapters

    # sync only: def in_this_loop(self) -> ThreadedGuard:
    # sync only:     """Return the async guard over the same store for the running event loop."""
    # sync only:     return self._in_loops().here()
    # sync only:
    # sync only: def _in_loops(self) -> LoopGuards:
    # sync only:     from semel.engine import aio
    # sync only:     from semel.engine.threaded import LoopGuards
    # sync only:
    # sync only:     if self._loop_guards is None:
    # sync only:         self._loop_guards = LoopGuards(self.store, self._settings)
    # sync only:     return self._loop_guards
    # sync only:
    def perform(
        self, declared: Declaration, args: tuple[Any, ...], kwargs: dict[str, Any], call: Call | None = None
    ) -> Awaitable[Outcome[Any]]:
        """Call a decorated function once.

        :param call: the call for these arguments, if the caller has already made it.
        """
        if call is None:
            call = self.declared_call(declared, args, kwargs)
        recover = declared.recover

        def handler(op: AsyncOperation) -> Any:
            # sync: return declared.invoke(op, args, kwargs)
            if declared.awaits:
                return declared.invoke(op, args, kwargs)
            return run_in_thread(declared.invoke, op, args, kwargs)  # async only

        outcome: Awaitable[Outcome[Any]] = self.driver.drive(call, handler, recover and (lambda: recover(args, kwargs)))
        return outcome
