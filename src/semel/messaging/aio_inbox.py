# Twin: inbox.py is generated from this file by make twins.
# Twin: await inbox.process -> inbox.process
# Twin: awaited=True -> awaited=False
"""The inbox: apply every message once, in the transaction of its effect.

::

    inbox = AsyncInbox(store)
    async with connection.transaction():
        await inbox.process(connection, "ledger", message_id, apply)

The message's id is written first, then the effect, and both commit together. A broker delivers a message again until it
is acknowledged, so acknowledge it after the commit. Then a repeat finds the id and does nothing.

``inbox.handler`` makes a consumer of a function: it receives from a broker, applies, acknowledges, retries and gives up
as ``core/messaging/consuming.py`` decides.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import random
import time
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from typing import Any, Final, TypeAlias, TypeVar, cast

from semel.core.call import Pause, Raised
from semel.core.keys import check_name, identity, normalize_key
from semel.core.lineage import Lineage, lineage_lines, read_metadata
from semel.core.messaging.consuming import (
    Acknowledge,
    AppliedMessage,
    ApplyMessages,
    ConsumerFlow,
    ConsumerPlan,
    ConsumerReport,
    MisplacedMessage,
    Postpone,
    Receive,
    RepeatedMessage,
    place_in_streams,
)
from semel.core.messaging.messages import MAX_NAME, Message, PurgeInbox, ReadOffsets, fits_column
from semel.core.messaging.relaying import POISON, Poison
from semel.core.policy import Duration, seconds
from semel.core.transactional import HandlersFault
from semel.engine.declare.handlers import with_handle
from semel.engine.operation import AsyncOperation
from semel.engine.operation.handle import set_lineage
from semel.engine.operation.propagation import MessageOrigin, message_origin
from semel.engine.ports import AsyncStore, check_sql_store, has_members, unit_of
from semel.errors import (
    BrokerUnavailable,
    ConfigurationError,
    InProgress,
    PolicyError,
    StoreError,
    StoreUnavailable,
    TransactionConflict,
)

# sync only: from semel.messaging.loop_thread import LoopThread
from semel.messaging.ports import Capabilities, SeekableSource, Source
from semel.messaging.reporting import reporter
from semel.observe import events
from semel.sql.aio import AsyncSQLUnit
from semel.sql.connections.errors import StatementRejected
from semel.sql.inbox import (
    apply_messages,
    forget_messages,
    lock_streams,
    move_offsets,
    move_streams,
    release_savepoint,
    set_savepoint,
    undo_savepoint,
)
from semel.stores.aio_guard import AsyncSemel

KEEP: Final = "15d"
REDRIVE_WITHIN: Final = "7d"
TRIES: Final = 10
PAUSE: Final = "1s"
LONGEST_PAUSE: Final = "5m"
BATCH: Final = 100
IDLE: Final = "1s"
PURGE_EVERY: Final = 600.0
"""Seconds between two purges of the inbox by a consumer."""
_TENANT: Final = "~inbox"
"""In place of a tenant, so that no operation has the identity of a message."""
_ROW: Final = "the row of the inbox"
_PLACE: Final = "the place in the stream"
_PURGED_AT_ONCE: Final = 1000
"""Rows that one statement removes. A longer one would hold its locks for too long."""
_depth: ContextVar[int] = ContextVar("semel_inbox_depth", default=0)
"""How many calls of ``process`` are under way in transactions of the caller."""


R = TypeVar("R")
_Applied: TypeAlias = AppliedMessage | RepeatedMessage
_log = logging.getLogger("semel.inbox")


class AsyncInbox:
    """The messages that consumers have applied, in the database of their effects."""

    def __init__(
        self,
        store: AsyncStore,
        *,
        keep: Duration = KEEP,
        redrive_within: Duration = REDRIVE_WITHIN,
        on_event: events.EventHooks | None = None,
    ) -> None:
        """
        :param store: a store in the database of the effects: SQLite, PostgreSQL or MySQL.
        :param keep: how long an applied message is remembered. A message that is delivered again after that is applied
            again, so it must be longer than the broker keeps messages and ``redrive_within`` together. If consumers in
            one database have different ones, the longest is used for all.
        :param redrive_within: how long a dead letter may wait before you redrive it.
        :param on_event: a hook, or a list of hooks, called with what ``process`` and ``process_many`` do. Handlers have
            a setting of their own.
        """
        check_sql_store(store, "Inbox", awaited=True)
        self._hook = events.call_hooks(events.hooks_of(on_event), "semel.inbox")
        self.store = store
        self.keep = seconds(keep, "keep")
        self.redrive_within = seconds(redrive_within, "redrive_within")

    async def process(
        self,
        connection: object,
        consumer: str,
        message_id: str,
        call: Callable[[], Any],
        *,
        own_transaction: bool = False,
    ) -> bool:
        """Call ``call()`` unless the consumer has applied this message. Returns whether it ran.

        It runs in the transaction that is open on the connection. If that is rolled back, the message counts as not
        applied. If ``call`` raises, what it wrote is undone, and the message counts as not applied, even if you catch
        the error and commit.

        While another transaction applies the same message, this one waits, and runs if that one is rolled back. If
        waiting takes too long (``lock_timeout``), it raises TransactionConflict: nobody knows yet, so have the message
        delivered again.

        :param consumer: who applies it, such as ``"ledger"``. Every consumer applies every message once.
        :param own_transaction: open a transaction and commit it here.
        """
        message = Message(message_id, "", b"")
        return bool(
            await self.process_many(connection, consumer, [message], lambda _: call(), own_transaction=own_transaction)
        )

    async def process_many(
        self,
        connection: object,
        consumer: str,
        messages: Sequence[Message],
        call: Callable[[list[Message]], Any],
        *,
        own_transaction: bool = False,
    ) -> int:
        """Call ``call(new)`` with the messages that the consumer has not applied yet. Returns how many these are.

        One statement finds them, whatever their number. If there are none, ``call`` is not called.
        """
        check_consumer(consumer)
        for message in messages:
            check_message_id(message.id)
        unit = self._unit(connection, own_transaction)
        program = apply_messages(unit.connection.dialect, consumer, [message.id for message in messages])
        began = time.monotonic()
        async with _transaction(unit, own_transaction):
            chosen = _first_ones(messages, await unit.run(program, _ROW))
            if chosen:
                async with _savepoint(unit, not own_transaction, consumer, chosen):
                    await _call(unit, lambda: call(chosen), _origin(consumer, chosen))
        if self._hook is not None:
            repeated = [message for message in messages if not any(message is each for each in chosen)]
            elapsed = time.monotonic() - began
            for event, some in ((events.AppliedEvent, chosen), (events.Skipped, repeated)):
                for message in some:
                    came, what = read_metadata(message.headers), message.type or consumer
                    self._hook(event(what, "", message.id, consumer, elapsed, came.root, came.parent, route=what))
        return len(chosen)

    def handler(
        self,
        consumer: str,
        *,
        connect: Callable[[], Any] | None = None,
        guard: AsyncSemel | None = None,
        ordered: bool = False,
        on_poison: Poison = "park",
        tries: int = TRIES,
        pause: Duration = PAUSE,
        longest_pause: Duration = LONGEST_PAUSE,
        batch: int = BATCH,
        in_batches: bool = False,
        store_offsets: bool = False,
        on_event: events.EventHooks | None = None,
    ) -> Callable[[Callable[[Any, Any], Any]], AsyncConsumer]:
        """Decorate a function that applies a message, and return a consumer: its ``run(source)`` consumes.

        ``async def apply(message, connection)`` writes its rows on the connection. The consumer opens a transaction,
        commits it, and then acknowledges. If the function raises, its rows are rolled back, and the message is
        delivered again. Messages that the function adds to an outbox have ids that are made of this message's id, so a
        re-run adds the same messages.

        :param connect: opens a connection or session for each message: a function that returns a context manager, such
            as ``pool.connection`` or a sessionmaker.
        :param guard: instead of ``connect``, for effects outside of the database: the function gets an operation of
            this guard, ``async def apply(message, op)``, with the message's id as its key, and uses its steps.
        :param ordered: the messages of a stream are applied in the order of their sequences. While one of them is
            retried, the later ones wait.
        :param on_poison: what happens to a stream when one of its messages is given up, with ``ordered``. ``"park"``:
            the later messages follow it to the dead letters, until it is redriven or purged. ``"skip"``: the stream
            goes on without it. ``"block"``: it is never given up, and the stream waits.
        :param tries: how often a message may start before it goes to the dead letters.
        :param pause: the longest pause after the first failure. The pauses double, and are random ...
        :param longest_pause: ... up to this.
        :param batch: how many messages to receive at once. Each is applied in a transaction of its own, unless ...
        :param in_batches: ... the function applies many: ``async def apply(messages, connection)`` gets a list of the
            new ones. If it fails, it is called for each message alone, so that one of them takes no other with it.
        :param store_offsets: for sources that seek (Kafka): the place in the log commits with the effect, and a
            consumer goes on there, whatever offset the broker knows. A message that is retried holds up its partition.
        :param on_event: is called with every event. Without it, problems are logged by the logger ``semel.inbox``.
        """
        check_consumer(consumer)
        if (connect is None) == (guard is None):
            raise ConfigurationError(
                "a handler needs connect=, which opens the connection that it writes to, or guard=, if its effects are "
                "outside of the database"
            )
        if connect is not None and not callable(connect):
            raise ConfigurationError(
                "connect= is a function that opens a connection, such as pool.connection or a sessionmaker, not a "
                f"{type(connect).__name__}"
            )
        if guard is not None and not isinstance(guard, AsyncSemel):
            raise ConfigurationError(f"this inbox uses guards of the class AsyncSemel, not {type(guard).__name__}")
        for name, number in (("tries", tries), ("batch", batch)):
            if type(number) is not int or number < 1:
                raise PolicyError(f"{name} is a whole number from 1, not {number!r}")
        if on_poison not in POISON:
            raise PolicyError(f"on_poison is {', '.join(map(repr, POISON))}, not {on_poison!r}")
        if guard is not None and (ordered or in_batches or store_offsets):
            raise ConfigurationError("ordered, in_batches and store_offsets need connect=: what they do commits there")
        if store_offsets and len(consumer) == MAX_NAME:
            raise ConfigurationError(f"with store_offsets=True a consumer's name has less than {MAX_NAME} characters")
        first, longest = seconds(pause, "pause"), seconds(longest_pause, "longest_pause")
        if not 0 < first <= longest:
            raise PolicyError("pause is longer than 0 s, and not longer than longest_pause")
        plan = ConsumerPlan(
            consumer=consumer, batch=batch, tries=tries, pause=first, longest_pause=longest, ordered=ordered,
            policy=on_poison, counts_starts=False, clock=time.monotonic, jitter=random.random,
            hook=reporter(_log, on_event), watched=bool(events.hooks_of(on_event)), in_batches=in_batches,
            stores_offsets=store_offsets,
        )  # fmt: skip

        def decorate(function: Callable[[Any, Any], Any]) -> AsyncConsumer:
            # sync only: if inspect.iscoroutinefunction(function):
            # sync only:     raise PolicyError("the handler is async: use AsyncInbox")
            _check_signature(function, "messages" if in_batches else "message", "connection" if connect else "op")
            return AsyncConsumer(self, function, plan, connect, guard)

        return decorate

    async def purge(self) -> int:
        """Forget the messages that were applied longer ago than ``keep``. Returns how many.

        It forgets nothing for a consumer in this database that remembers for longer.
        """
        return await self._purge("")

    async def _purge(self, consumer: str) -> int:
        total = 0
        while True:
            gone = await self.store.execute(PurgeInbox(self.keep, _PURGED_AT_ONCE, consumer))
            total += gone
            if gone < _PURGED_AT_ONCE:
                return total

    def _unit(self, connection: object, own: bool) -> AsyncSQLUnit:
        unit: AsyncSQLUnit = unit_of(self.store, connection)
        unit.require(own)
        return unit


class AsyncConsumer:
    """Applies the messages of a broker with one function. ``inbox.handler`` makes it."""

    def __init__(
        self,
        inbox: AsyncInbox,
        function: Callable[[Any, Any], Any],
        plan: ConsumerPlan,
        connect: Callable[[], Any] | None,
        guard: AsyncSemel | None,
    ) -> None:
        self.name = plan.consumer
        self.report = ConsumerReport()
        """What ``run`` has done so far."""
        self._inbox = inbox
        self._function = function
        self._plan = plan
        self._connect = connect
        self._guard = guard
        self._stopping = False
        self._runs = 0
        # sync only: self._loop: LoopThread | None = None
        self._purge_at = 0.0

    def __call__(self, message: Any, connection: Any) -> Any:
        """Call the function itself."""
        return self._function(message, connection)

    async def run(self, source: Source) -> None:
        """Consume until ``stop`` is called, and close the source then. Run it in several processes for more speed.

        Raises ConfigurationError if the source does not fit, or the inbox forgets sooner than the broker.
        """
        await self._consume(source, self.report, None)

    async def drain(self, source: Source, *, idle: Duration = IDLE) -> ConsumerReport:
        """Consume until no message has come for a while, close the source, and return what was done.

        It also ends if the broker or the database is down. For jobs and for tests.
        """
        report = ConsumerReport()
        await self._consume(source, report, seconds(idle, "idle"))
        return report

    def stop(self) -> None:
        """End ``run`` after the message that is being applied. May be called from a signal handler.

        If it has not begun yet, it ends as soon as it begins.
        """
        self._stopping = True

    async def _consume(self, source: Source, report: ConsumerReport, until_idle: float | None) -> None:
        if not has_members(source, ("capabilities", "receive")):
            wrong = "a string: open_source(URL) opens one" if isinstance(source, str) else type(source).__name__
            raise ConfigurationError(f"a consumer takes a source, not {wrong}")
        self._check(source.capabilities)
        plan = replace(self._plan, counts_starts=source.capabilities.counts_starts)
        flow = plan.run(lambda: self._stopping, report, until_idle)
        if plan.stores_offsets:
            cast(SeekableSource, source).begin_at(self._reader_of_offsets())
        # sync only: self._loop = LoopThread("semel-inbox")
        self._runs += 1
        try:
            await self._drive(flow, source)
        finally:
            self._runs -= 1
            if not self._runs:  # at the end, because a signal that comes before the beginning must not be lost
                self._stopping = False
            # sync: try:
            # sync:     self._loop.run(source.close())
            # sync: finally:
            # sync:     self._loop.close()
            await source.close()

    def _check(self, known: Capabilities) -> None:
        inbox = self._inbox
        if self._plan.stores_offsets and not known.seeks:
            raise ConfigurationError(f"{known.name} cannot begin at a stored offset: leave out store_offsets=True")
        if self._plan.ordered and not known.ordered:
            raise ConfigurationError(
                f"{known.name} does not deliver the messages of a stream in their order: leave ordered=True out, or "
                "consume from a source that keeps it"
            )
        longest = (known.retention or 0.0) + inbox.redrive_within
        if inbox.keep <= longest:
            days = f"{known.retention / 86400:g}" if known.retention else ""
            kept = f"{known.name} keeps messages for {days}, and " if days else ""
            raise ConfigurationError(
                f"the inbox forgets a message after {inbox.keep / 86400:g} days, and it may come again for "
                f"{longest / 86400:g} days: {kept}dead letters are redriven within {inbox.redrive_within / 86400:g}. "
                "Then it would be applied twice. Pass a longer keep= to the inbox, or shorten redrive_within="
            )

    def _reader_of_offsets(self) -> Callable[[Sequence[str]], Mapping[str, int]]:
        loop = asyncio.get_running_loop()  # async only

        def read(places: Sequence[str]) -> Mapping[str, int]:  # in a thread of the source
            op = ReadOffsets(self.name, tuple(places))
            # sync: return self._inbox.store.execute(op)
            return asyncio.run_coroutine_threadsafe(self._inbox.store.execute(op), loop).result()

        return read

    async def _drive(self, flow: ConsumerFlow, source: Source) -> None:
        answer: Any = None
        with contextlib.suppress(StopIteration):
            while True:
                request = flow.send(answer)
                answer = None
                try:
                    if isinstance(request, ApplyMessages):
                        answer = await self._apply(request)
                    elif isinstance(request, Receive):
                        await self._purge()
                        answer = await self._ask(source.receive(request.limit, request.seconds))
                    elif isinstance(request, Acknowledge):
                        await self._ask(source.acknowledge(request.deliveries))
                    elif isinstance(request, Postpone):
                        await self._ask(source.postpone(request.delivery, request.seconds))
                    elif isinstance(request, Pause):
                        await asyncio.sleep(request.seconds)
                    else:
                        answer = await self._inbox.store.execute(request)
                except (BrokerUnavailable, StoreError) as error:
                    answer = Raised(error)

    # sync: def _ask(self, coroutine: Coroutine[Any, Any, R]) -> R:
    # sync:     assert self._loop is not None
    # sync:     return self._loop.run(coroutine)
    async def _ask(self, coroutine: Coroutine[Any, Any, R]) -> R:
        """Wait for the source."""
        return await coroutine

    async def _purge(self) -> None:
        """Forget old messages now and then. Sources need no clean-up job beside the consumer."""
        if time.monotonic() >= self._purge_at:
            self._purge_at = time.monotonic() + PURGE_EVERY
            with contextlib.suppress(StoreError):  # the next purge does it
                await self._inbox._purge(self.name)

    async def _apply(self, request: ApplyMessages) -> Sequence[_Applied] | MisplacedMessage | Raised:
        if self._guard is not None:
            return await self._run_guarded(self._guard, request.messages[0])
        assert self._connect is not None
        answer: Sequence[_Applied] | MisplacedMessage = ()
        failure: Exception | None = None
        try:
            async with contextlib.AsyncExitStack() as stack:
                try:
                    connection = await stack.enter_async_context(self._connect())
                except StoreError:
                    raise
                except Exception as error:
                    raise StoreUnavailable(f"no connection could be opened: {error!r}") from error
                try:
                    answer = await self._apply_on(connection, request.messages, request.offsets)
                except _NotApplied as ended:  # rolled back, and no error for the caller's context manager
                    answer = ended.answer
                except Exception as error:
                    failure = error  # the caller's context manager may swallow it, or raise another one
                    raise
        except StoreError as error:
            failure = failure or error
        except Exception as error:
            failure = failure or StoreUnavailable(f"the connection could not be given back: {error!r}")
        if failure is None:
            return answer
        cause = failure.error if isinstance(failure, _HandlerFailed) else failure
        if isinstance(cause, StatementRejected):
            # Such as a constraint that is checked at the commit, or a message that the handler adds to an outbox after
            # its transaction has failed. The database is not down, and this one message must not hold up all others.
            return Raised(cause.__cause__ or ValueError(str(cause)))
        if isinstance(failure, (_HandlerFailed, StoreError)):
            return Raised(cause)
        raise failure

    async def _apply_on(
        self, connection: object, messages: Sequence[Message], offsets: Mapping[str, int]
    ) -> list[_Applied]:
        """Apply the messages in a transaction of their own. Raises _NotApplied or _HandlerFailed."""
        unit = self._inbox._unit(connection, own=True)
        dialect, name = unit.connection.dialect, self.name
        async with _transaction(unit, own=True):
            new = await unit.run(apply_messages(dialect, name, [message.id for message in messages]), _ROW)
            chosen = _first_ones(messages, new)
            if not chosen:
                raise _NotApplied([RepeatedMessage()] * len(messages))
            streams = {message.stream for message in chosen if message.stream and message.sequence > 0}
            before: dict[str, int] = {}
            if self._plan.ordered and streams:
                before = await unit.run(lock_streams(dialect, name, streams), _PLACE)
            places = place_in_streams(before, chosen)
            if isinstance(places, MisplacedMessage):
                raise _NotApplied(places)
            what = chosen if self._plan.in_batches else chosen[0]
            try:
                # sync: _call(unit, partial(self._function, what, connection), _origin(name, chosen))
                await _call(unit, partial(_contained, self._function, what, connection), _origin(name, chosen))
                await unit.finish()
            except Exception as error:
                if unit.conflicts(error) and not isinstance(error, TransactionConflict):
                    raise TransactionConflict(f"another transaction was in the handler's way: {error}") from error
                raise _HandlerFailed(error) from error
            if before:
                await unit.run(move_streams(dialect, name, chosen, before), _PLACE)
            if offsets:
                await unit.run(move_offsets(dialect, name, offsets), "the offset")
        applied = {message.id: place for message, place in zip(chosen, places, strict=True)}
        return [applied.pop(message.id, RepeatedMessage()) for message in messages]

    async def _run_guarded(self, guard: AsyncSemel, message: Message) -> Sequence[_Applied] | Raised:
        """Apply a message whose effects are outside of the database, with the steps of an operation."""

        async def work(op: AsyncOperation) -> None:
            # sync: _finish(self._function(message, op))
            await _contained(self._function, message, op)

        try:
            policy = guard.policy.replace(ttl=self._inbox.keep)
            call = guard.make_call(self.name, normalize_key(message.id), guard.tenant, b"", policy)
            set_lineage(call, lineage_lines(read_metadata(message.headers)))
            outcome = await guard.driver.drive(call, with_handle(work), call.policy.recover)
        except InProgress as error:  # another consumer has it, and may fail
            return Raised(TransactionConflict(str(error)))
        except Exception as error:
            return Raised(error)
        return [RepeatedMessage() if outcome.replayed else AppliedMessage()]


class _NotApplied(Exception):
    """The handler did not run, and nothing is to be committed."""

    def __init__(self, answer: Sequence[RepeatedMessage] | MisplacedMessage) -> None:
        self.answer = answer


class _HandlerFailed(Exception):
    """The handler raised this."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


async def _call(unit: AsyncSQLUnit, call: Callable[[], Any], origin: MessageOrigin) -> None:
    # The row of the inbox is written by now. If the call committed, a crash after that would lose the rest.
    unit.watch()
    outer = message_origin.set(origin)
    try:
        await _finish(call())
    finally:
        message_origin.reset(outer)
        unit.unwatch()


# async only
async def _contained(function: Callable[[Any, Any], Any], first: Any, second: Any) -> None:
    """Call a handler. A cancellation of another task, which the handler waits for, must not end the consumer."""
    task = asyncio.current_task()
    before = task.cancelling() if task is not None else 0
    try:
        await _finish(function(first, second))
    except asyncio.CancelledError as error:
        if task is None or task.cancelling() > before:
            raise
        raise RuntimeError("the handler waited for something that was cancelled") from error


def _check_signature(function: Callable[..., Any], first: str, second: str) -> None:
    """Raise PolicyError if the function cannot be called so. Every message would fail, and become a dead letter."""
    try:
        inspect.signature(function).bind(first, second)
    except TypeError as error:
        name = getattr(function, "__qualname__", repr(function))
        raise PolicyError(f"a handler is called with two arguments, {name}({first}, {second}): {error}") from None
    except ValueError:
        pass  # a function in C may have no signature


async def _finish(result: Any) -> None:
    # sync: if inspect.iscoroutine(result):
    # sync:     result.close()
    # sync:     raise PolicyError("the handler is async: use AsyncInbox")
    if inspect.isawaitable(result):
        await result


def _first_ones(messages: Sequence[Message], ids: Collection[str]) -> list[Message]:
    """Return the messages that have these ids, each id once, in their order."""
    found: dict[str, Message] = {}
    for message in messages:
        if message.id in ids:
            found.setdefault(message.id, message)
    return list(found.values())


def _origin(consumer: str, messages: Sequence[Message]) -> MessageOrigin:
    """Where the messages come from that are added while these are applied. A re-run adds the same messages."""
    message = messages[0]
    if len(messages) > 1:  # what comes from many names no cause
        return MessageOrigin(identity(_TENANT, consumer, message.id), "", Lineage())
    came = read_metadata(message.headers)
    return MessageOrigin(
        identity(_TENANT, consumer, message.id), message.id, Lineage(came.root or message.id, message.id, came.trace)
    )


@contextlib.asynccontextmanager
async def _transaction(unit: AsyncSQLUnit, own: bool) -> AsyncGenerator[None, None]:
    """Open a transaction and commit it, or roll it back after an error; without ``own`` the caller does that."""
    if not own:
        yield
        return
    try:
        await unit.begin()
        yield
        try:
            await unit.commit()
        except HandlersFault as fault:
            raise StatementRejected(str(fault.__cause__)) from fault.__cause__
    except BaseException:
        with contextlib.suppress(Exception):  # the connection is gone, and the transaction with it
            await unit.undo()
        raise


@contextlib.asynccontextmanager
async def _savepoint(
    unit: AsyncSQLUnit, wanted: bool, consumer: str, messages: Sequence[Message]
) -> AsyncGenerator[None, None]:
    """Undo the messages if their function raises.

    The transaction is the caller's, who may catch the error and commit. The row of the inbox would then say that the
    message was applied: it would be lost.
    """
    if not wanted:
        yield
        return
    depth = _depth.get()
    nested = await unit.nest()
    if nested is None:
        await unit.run(set_savepoint(depth), _ROW)
    outer = _depth.set(depth + 1)
    try:
        yield
        await unit.finish()  # what a session still holds back may be refused
        await _release(unit, nested, depth)
    except BaseException:
        with contextlib.suppress(Exception):  # the transaction has ended, and everything with it
            if nested is None:
                await unit.run(undo_savepoint(depth), _ROW)
            else:
                await nested.rollback()
            ids = [message.id for message in messages]
            await unit.run(forget_messages(unit.connection.dialect, consumer, ids), _ROW)
        raise
    finally:
        _depth.reset(outer)


async def _release(unit: AsyncSQLUnit, nested: Any, depth: int) -> None:
    try:
        if nested is None:
            await unit.run(release_savepoint(depth), _ROW)
        else:
            await unit.release(nested, _ROW)
    except StoreUnavailable as error:
        if not isinstance(error, StatementRejected) and unit.connection.dialect != "sqlite":  # it has none to lose
            raise
        raise ConfigurationError(
            "the function has ended the transaction, or caught an error after which the database accepts only a "
            "rollback, so the message would not commit together with your rows. Leave commit() and rollback() out, and "
            f"raise an error to have it undone ({error})"
        ) from error


def check_consumer(consumer: str) -> None:
    """Raise ConfigurationError unless this can be the name of a consumer."""
    check_name("a consumer", consumer)
    if len(consumer) > MAX_NAME or consumer.startswith("~"):
        raise ConfigurationError(f"the name of a consumer has at most {MAX_NAME} characters and begins with no ~")


def check_message_id(id: str) -> None:
    """Raise ConfigurationError unless the inbox can hold the id."""
    if not isinstance(id, str):
        raise ConfigurationError(f"the id of a message is text, not {type(id).__name__}: pass str(…)")
    if not id or not fits_column(id):
        raise ConfigurationError(
            f"the id of a message is text of 1 to {MAX_NAME} characters, without control characters, and without "
            "spaces at its ends: without an id nobody can tell whether it was applied"
        )
