"""The DynamoDB store for threads, by boto3: each caller makes its own calls, on one client's pool of connections."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar, cast

from semel.core.ops import Op
from semel.core.policy import Duration
from semel.engine.forking import survive_forks
from semel.errors import SemelError, StoreError, StoreUnavailable
from semel.stores.dynamodb import table
from semel.stores.dynamodb.programs import Call, Programs, Reply
from semel.stores.dynamodb.settings import (
    CONNECT_TIMEOUT,
    READS,
    RETRY_FOR,
    TIMEOUT,
    Settings,
    Tries,
    answered,
    named,
    public,
    require,
)
from semel.stores.dynamodb.transactions import accept

__all__ = ["DynamoDBStore", "check", "migrate", "printed"]

R = TypeVar("R")


@functools.cache
def _session() -> Any:
    """One for the process: it holds the credentials and the description of the service, which takes long to read."""
    return require("boto3", "dynamodb").session.Session()


_making: Final = threading.Lock()
"""Clients may be used by many threads, but are made by one at a time."""


def _client(settings: Settings) -> Any:
    config = require("botocore.config", "dynamodb").Config(**settings.config())
    try:
        with _making:
            return _session().client(**settings.client(), config=config)
    except Exception as error:
        raise public(named(error, settings.table)) from error


def migrate(url: str) -> list[str]:
    """Make the table, and have the service remove what expires; answers what was done, nothing when it was."""
    settings = Settings(url, TIMEOUT, CONNECT_TIMEOUT, RETRY_FOR, None)
    client = _client(settings)
    done = []
    try:
        try:
            client.create_table(**table.made(settings.table))
            done.append(f"table {settings.table}")
        except client.exceptions.ResourceInUseException:
            pass  # it is there, or another process is making it
        client.get_waiter("table_exists").wait(TableName=settings.table)
        # Before anything is changed: where the name is that of another table, its items would begin to go.
        table.check_key(settings.table, client.describe_table(TableName=settings.table)["Table"])
        told = client.describe_time_to_live(TableName=settings.table)["TimeToLiveDescription"]
        if not table.removes(settings.table, told):
            if not done:
                seen = client.scan(TableName=settings.table, Limit=1, ConsistentRead=True)
                table.check_items(settings.table, seen.get("Items", ()))
            client.update_time_to_live(TableName=settings.table, TimeToLiveSpecification=table.ttl())
            done.append("time to live")
    except SemelError:
        raise
    except Exception as error:
        raise public(named(error, settings.table)) from error
    finally:
        client.close()
    return done


def check(url: str) -> None:
    """Raise NotMigrated or SchemaDrift unless the table is the one that ``migrate`` makes."""
    settings = Settings(url, TIMEOUT, CONNECT_TIMEOUT, RETRY_FOR, None)
    client = _client(settings)
    try:
        real = client.describe_table(TableName=settings.table)["Table"]
        told = client.describe_time_to_live(TableName=settings.table)["TimeToLiveDescription"]
    except Exception as error:
        raise public(named(error, settings.table)) from error
    finally:
        client.close()
    table.compare(settings.table, real, told)


def printed(what: str, url: str) -> str:
    """The table of this URL for ``cloudformation`` or ``terraform``, or the rights on it: ``iam``. Asks nobody."""
    settings = Settings(url, TIMEOUT, CONNECT_TIMEOUT, RETRY_FOR, None)
    return table.text(what, settings.table, settings.region)


class DynamoDBStore:
    """A store in a DynamoDB table, for threads. The client is made when first needed."""

    wakes = False
    counts = False
    resumes = False
    adopt = None
    accept = staticmethod(accept)

    def __init__(
        self,
        url: str,
        *,
        timeout: Duration = TIMEOUT,
        connect_timeout: Duration = CONNECT_TIMEOUT,
        retry_for: Duration = RETRY_FOR,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """
        :param url: ``dynamodb://region/table``; credentials are those of the process, as boto3 finds them.
        :param timeout: how long the service may take for one call.
        :param retry_for: how long a call is tried again before the Op fails: throttled, or without an answer.
        :param clock: seconds since 1970; by default the service's, from the Date headers of its answers.
        """
        self._settings = Settings(url, timeout, connect_timeout, retry_for, clock)
        require("boto3", "dynamodb")
        self._programs = Programs(self._settings.table, self._settings.clock)
        self._client: Any = None
        self._closed = False
        self._renew()
        survive_forks(self._renew)

    def _renew(self) -> None:
        # A child makes a client of its own; the parent's connections are neither used nor closed.
        self._left_behind, self._client = self._client, None
        self._lock = threading.Lock()

    def execute(self, op: Op[R]) -> R:
        program = self._programs.of(op)
        tries = Tries(self._settings.retry_for)
        try:
            call = next(program)
            while True:
                call = program.send(self._sent(call, tries))
        except StopIteration as stop:
            return cast(R, stop.value)

    def execute_many(self, ops: Sequence[Op[Any]]) -> list[Any]:
        answers: list[Any] = []
        for op in ops:
            try:
                answers.append(self.execute(op))
            except StoreError as error:
                answers.append(error)
        return answers

    def wait(self, id: bytes, seconds: float) -> None:
        """Never called: the engine polls."""
        time.sleep(min(seconds, 0.05))

    def close(self) -> None:
        with self._lock:
            self._closed = True
            client, self._client = self._client, None
        if client is not None:
            client.close()

    def _sent(self, call: Call, tries: Tries) -> Reply:
        while True:
            begun = self._settings.clock.here()
            try:
                reply: dict[str, Any] = getattr(self._open(), call.action)(**call.params)
                self._told(reply, begun)
                if call.action not in READS:
                    tries.wrote()
                return reply
            except SemelError:
                raise
            except Exception as error:
                self._told(getattr(error, "response", None) or {}, begun)
                answer = answered(error, call)
                if answer is not None:
                    return answer
                failure = named(error, self._settings.table)
                failure.__cause__ = error
                time.sleep(tries.pause_after(failure, call.once))

    def _told(self, response: dict[str, Any], begun: float) -> None:
        headers = response.get("ResponseMetadata", {}).get("HTTPHeaders", {})
        self._settings.clock.heard(headers.get("date"), begun, self._settings.clock.here())

    def _open(self) -> Any:
        client = self._client
        if client is None:
            with self._lock:
                if self._closed:
                    raise StoreUnavailable("the store is closed")
                if self._client is None:
                    self._client = _client(self._settings)
                client = self._client
        return client
