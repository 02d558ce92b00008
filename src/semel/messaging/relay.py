"""``Relay`` and ``AsyncRelay``: they send what is in the outbox to a broker.

::

    async with AsyncRelay(store, open_broker("kafka://localhost:9092/orders")):
        ...

What to send, and when, is decided in ``core/messaging/relaying.py``. ``AsyncRelay`` drives that flow in a task.
``Relay`` does so in a thread with an event loop of its own, because brokers are async; the calls to its sync store go
to further threads.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from semel.core.call import Pause, Raised, describe_error
from semel.core.messaging.messages import OUTBOX, Outgoing, ReadLog, StartMessages
from semel.core.messaging.relaying import POISON, Poison, Publish, RelayFlow, RelayPlan, RelayReport, Rest
from semel.core.policy import Duration, seconds
from semel.engine.background import BackgroundTask, BackgroundThread
from semel.engine.forking import survive_forks
from semel.engine.ports import AsyncStore, Store, check_sql_store, has_members
from semel.engine.threaded import ThreadedStore
from semel.errors import BrokerUnavailable, ConfigurationError, PolicyError, StoreError
from semel.messaging.ports import Broker, BrokerDown, Result, TryAgain
from semel.messaging.reporting import reporter
from semel.observe import events

BATCH: Final = 500
LEASE: Final = "30s"
TRIES: Final = 10
PAUSE: Final = "1s"
LONGEST_PAUSE: Final = "5m"
SHORTEST_LEASE: Final = 1.0
LISTEN_FOR: Final = 1.0
"""Seconds. The stores wait no longer at a time."""
FAILED_PAUSE: Final = 1.0
R = TypeVar("R")
_log = logging.getLogger("semel.relay")


class AsyncRelay:
    """Sends the messages of an outbox to a broker, in a task of its own. Any number of relays may run anywhere."""

    def __init__(
        self,
        store: AsyncStore,
        broker: Broker,
        *,
        batch: int = BATCH,
        lease: Duration = LEASE,
        tries: int = TRIES,
        pause: Duration = PAUSE,
        longest_pause: Duration = LONGEST_PAUSE,
        on_poison: Poison | Mapping[str, Poison] = "block",
        allow_unordered: bool = False,
        on_event: events.EventHooks | None = None,
    ) -> None:
        """
        :param store: the store in the database with the outbox: SQLite, PostgreSQL or MySQL.
        :param broker: an adapter, such as ``open_broker(url)`` returns. The relay closes it when it ends.
        :param batch: how many messages are sent at a time. In a backlog, up to four times as many.
        :param lease: how long a relay that has died keeps its share of the streams from the others.
        :param tries: how many attempts to send a message may fail before ``on_poison`` decides.
        :param pause: how long a message rests after its first failure; the pauses then double, with jitter ...
        :param longest_pause: ... up to this.
        :param on_poison: what happens to a message that cannot be sent. ``"block"``: its stream waits, and it is tried
            again for ever. ``"park"``: it goes to the dead letters, and so do the later messages of its stream.
            ``"skip"``: it goes to the dead letters, and its stream goes on. Or a mapping of patterns of streams, such
            as ``{"orders-*": "park", "*": "skip"}``: the first that matches decides.
        :param allow_unordered: publish to a broker that does not keep the order of streams.
        :param on_event: is called with every event. Without it, problems are logged by the logger ``semel.relay``.
        """
        check_sql_store(store, "Relay", awaited=True)
        self.report = RelayReport()
        """What this relay has done so far."""
        self._driver = _Driver(
            store,
            broker,
            _plan(
                broker, batch, lease, tries, pause, longest_pause, on_poison, allow_unordered, reporter(_log, on_event)
            ),
            self.report,
        )
        self._background = BackgroundTask("semel-relay")

    def start(self) -> None:
        """Start, in the background of the running event loop."""
        self._driver.stopping = False
        self._background.start(self.run)

    async def stop(self, timeout: float | None = None) -> None:
        """Stop after the batch that is being sent. Waits for it, and cancels it after ``timeout`` seconds."""
        self._driver.ask_to_stop()
        await self._background.stop(timeout)

    def wake(self) -> None:
        """Look for messages now. For a program that has just added one."""
        self._driver.wake()

    async def run(self) -> None:
        """Send messages in this task until ``stop`` is called."""
        await self._driver.run()

    async def drain(self) -> RelayReport:
        """Send all messages that are due, and return what was done. Returns early if the broker is down.

        Raises StoreError.
        """
        return await self._driver.drain()

    async def __aenter__(self) -> Self:
        self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()
        self._driver.forget_stop()


class Relay:
    """Sends the messages of an outbox to a broker, in a thread of its own. Any number of relays may run anywhere."""

    def __init__(
        self,
        store: Store,
        broker: Broker,
        *,
        batch: int = BATCH,
        lease: Duration = LEASE,
        tries: int = TRIES,
        pause: Duration = PAUSE,
        longest_pause: Duration = LONGEST_PAUSE,
        on_poison: Poison | Mapping[str, Poison] = "block",
        allow_unordered: bool = False,
        on_event: events.EventHooks | None = None,
    ) -> None:
        """Same parameters as ``AsyncRelay``, with a sync store."""
        check_sql_store(store, "Relay", awaited=False)
        self.report = RelayReport()
        """What this relay has done so far."""
        self._store = store
        self._broker = broker
        self._plan = _plan(
            broker, batch, lease, tries, pause, longest_pause, on_poison, allow_unordered, reporter(_log, on_event)
        )
        self._background = BackgroundThread("semel-relay")
        self._running: dict[_Driver, asyncio.AbstractEventLoop] = {}
        """Several, if it drains while it runs in the background."""
        self._stopping = False
        """Whether those that run, or else the next one, are to end."""
        survive_forks(self._forked)

    def start(self) -> None:
        """Start, in the background."""
        self._stopping = False
        self._background.start(self.run)

    def stop(self, timeout: float | None = None) -> None:
        """Stop after the batch that is being sent. Waits for it, for at most ``timeout`` seconds."""
        self._stopping = True
        self._tell(_Driver.ask_to_stop)
        self._background.stop(timeout)

    def wake(self) -> None:
        """Look for messages now. For a program that has just added one."""
        self._tell(_Driver.wake)

    def run(self) -> None:
        """Send messages in this thread until ``stop`` is called."""
        asyncio.run(self._in_loop(_Driver.run))

    def drain(self) -> RelayReport:
        """Send all messages that are due, and return what was done. Returns early if the broker is down.

        Raises StoreError.
        """
        return asyncio.run(self._in_loop(_Driver.drain))

    async def _in_loop(self, use: Callable[[_Driver], Coroutine[Any, Any, R]]) -> R:
        store = ThreadedStore(self._store)
        driver = _Driver(store, self._broker, self._plan, self.report)
        self._running[driver] = asyncio.get_running_loop()
        driver.stopping = self._stopping  # it may have been set before there was a loop to tell
        try:
            return await use(driver)
        finally:
            del self._running[driver]
            if not self._running:  # at the end, because a signal that comes before the beginning must not be lost
                self._stopping = False
            store.shut_down()

    def _tell(self, what: Callable[[_Driver], None]) -> None:
        for driver, loop in list(self._running.items()):
            with suppress(RuntimeError):  # the loop has just been closed
                loop.call_soon_threadsafe(what, driver)

    def _forked(self) -> None:
        """In a forked child: the loops stayed in the parent."""
        self._running = {}
        self._stopping = False

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        self._stopping = bool(self._running)  # if it was stopped before, nothing is left to stop


class _Driver:
    """Drives the flow of a relay, in an event loop."""

    def __init__(self, store: AsyncStore, broker: Broker, plan: RelayPlan, report: RelayReport) -> None:
        self._store = store
        self._broker = broker
        self._plan = plan
        self._report = report
        self._awake = asyncio.Event()
        self.stopping = False
        self._runs = 0

    def ask_to_stop(self) -> None:
        self.stopping = True
        self.wake()

    def wake(self) -> None:
        self._awake.set()

    async def run(self) -> None:
        self._awake = asyncio.Event()  # that of an earlier run belongs to the event loop of that run
        listener = asyncio.create_task(self._listen(), name="semel-relay-listener") if self._store.wakes else None
        self._runs += 1
        try:
            while not self.stopping:
                try:
                    await self._drive(self._plan.run(lambda: self.stopping, self._report))
                except Exception as error:  # such as tables that are migrated later
                    self._plan.hook(events.StoreFailed("", "", "", "relay", describe_error(error)))
                    await self._rest(FAILED_PAUSE)
        finally:
            self._end()
            if listener is not None:
                listener.cancel()
                await asyncio.gather(listener, return_exceptions=True)
            await self._broker.close()

    async def drain(self) -> RelayReport:
        report = RelayReport()
        self._runs += 1
        try:
            await self._drive(self._plan.run(lambda: self.stopping, report, until_idle=True))
        finally:
            self._end()
            await self._broker.close()
        return report

    def _end(self) -> None:
        self._runs -= 1
        self.forget_stop()

    def forget_stop(self) -> None:
        """If nothing runs any more, the next run or drain is not to be stopped."""
        if not self._runs:
            self.stopping = False

    async def _drive(self, flow: RelayFlow) -> None:
        answer: Any = None
        with suppress(StopIteration):
            while True:
                request = flow.send(answer)
                answer = None
                if isinstance(request, Publish):
                    if request.meanwhile is None:
                        answer = await self._publish(request)
                    else:
                        # The read goes first, because an adapter may be busy before it lets others run.
                        reading = self._read(request.meanwhile, request.deadline)
                        read, results = await asyncio.gather(reading, self._publish(request))
                        answer = results, read
                elif isinstance(request, Rest):
                    answer = await self._rest(request.seconds)
                elif isinstance(request, Pause):
                    await asyncio.sleep(request.seconds)
                else:
                    try:
                        answer = await self._store.execute(request)
                    except Exception as error:  # not only a StoreError: a new flow would have a new name, and no lanes
                        answer = Raised(error)

    async def _publish(self, request: Publish) -> Sequence[Result]:
        """Publish. An adapter that hangs, or fails in a way that it should not, must not stop the relay."""
        messages = request.messages
        failure: Result
        try:
            async with asyncio.timeout(request.deadline - time.monotonic() + self._plan.lease / 6):
                results = await self._broker.publish(messages, request.deadline)
            if len(results) == len(messages):
                return results
            failure = TryAgain(f"the adapter returned {len(results)} results for {len(messages)} messages")
        except TimeoutError:
            failure = TryAgain("the adapter did not return by the deadline")
        except BrokerUnavailable as error:
            failure = BrokerDown(str(error))
        except Exception as error:
            failure = TryAgain(f"the adapter raised {describe_error(error)}")
        return [failure] * len(messages)

    async def _read(self, op: StartMessages | ReadLog, deadline: float) -> tuple[Outgoing, ...] | None:
        """Read ahead. A read that fails or takes too long must not keep what is published from being settled."""
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                return await self._store.execute(op)
        except Exception:
            return None  # it is read again, and then its error is reported

    async def _rest(self, longest: float) -> bool:
        """Wait for a wake-up. Returns whether there was one."""
        try:
            async with asyncio.timeout(longest):
                await self._awake.wait()
        except TimeoutError:
            return False
        self._awake.clear()
        return True

    async def _listen(self) -> None:
        """Wake up when another process has added a message."""
        while True:
            began = time.monotonic()
            try:
                await self._store.wait(OUTBOX, LISTEN_FOR)
            except StoreError:
                await asyncio.sleep(LISTEN_FOR)
            if time.monotonic() - began < LISTEN_FOR * 0.9:
                self._awake.set()
                # A storm of wake-ups must not keep the loop busy. One that comes now is missed; the next look is near.
                await asyncio.sleep(0.001)


def _plan(
    broker: Broker,
    batch: int,
    lease: Duration,
    tries: int,
    pause: Duration,
    longest_pause: Duration,
    on_poison: Poison | Mapping[str, Poison],
    allow_unordered: bool,
    hook: events.EventHook,
) -> RelayPlan:
    """Return the plan of these settings. Raises PolicyError or ConfigurationError."""
    if not has_members(broker, ("capabilities", "publish")):
        wrong = "a string: open_broker(URL) opens one" if isinstance(broker, str) else type(broker).__name__
        raise ConfigurationError(f"a relay takes a broker, not {wrong}")
    known = broker.capabilities
    if not known.ordered and not allow_unordered:
        raise ConfigurationError(
            f"{known.name} does not keep the order of a stream: pass allow_unordered=True (--allow-unordered) if the "
            "consumers need no order or sort by ce-sequence, or publish to a broker that keeps it"
        )
    plan = RelayPlan(
        batch=batch, lease=seconds(lease, "lease"), tries=tries, pause=seconds(pause, "pause"),
        longest_pause=seconds(longest_pause, "longest_pause"), policy=_policy(on_poison), pipelines=known.pipelines,
        largest=known.largest, clock=time.monotonic, jitter=random.random, new_id=lambda: os.urandom(16), hook=hook,
    )  # fmt: skip
    for name, number, least in (("batch", batch, 1), ("tries", tries, 1)):
        if type(number) is not int or number < least:
            raise PolicyError(f"{name} is a whole number from {least}, not {number!r}")
    if plan.lease < SHORTEST_LEASE:
        raise PolicyError(f"the lease of a relay is at least {SHORTEST_LEASE:g} s, not {lease!r}")
    if not 0 < plan.pause <= plan.longest_pause:
        raise PolicyError("pause is longer than 0 s, and not longer than longest_pause")
    return plan


def _policy(on_poison: Poison | Mapping[str, Poison]) -> Callable[[str], Poison]:
    patterns = {"*": on_poison} if isinstance(on_poison, str) else dict(on_poison)
    for policy in patterns.values():
        if policy not in POISON:
            raise PolicyError(f"on_poison is {', '.join(map(repr, POISON))}, not {policy!r}")

    def decide(stream: str) -> Poison:
        return next((policy for pattern, policy in patterns.items() if fnmatchcase(stream, pattern)), "block")

    return decide
