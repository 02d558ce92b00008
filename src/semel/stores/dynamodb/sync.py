"""The DynamoDB store for threads, by boto3: each caller makes its own calls, over one client's pool of connections.

``aio.py`` is the store for event loops. Both are written by hand, because they share little that waits: there a call
runs in a task that a cancelled caller can join again, and the client belongs to a loop; here threads share one client,
and forked children make their own. What is sent, and how replies and errors are judged, is in ``programs.py`` and
``failures.py``.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar, cast

from semel.core.ops import Op
from semel.core.policy import Duration
from semel.engine.forking import survive_forks
from semel.engine.ports import STORE_CLOSED
from semel.errors import SemelError, StoreError, StoreUnavailable
from semel.stores.dynamodb import table
from semel.stores.dynamodb.failures import CallRetry, error_of, public_error, take_error, take_reply
from semel.stores.dynamodb.programs import ApiCall, DynamoDBPrograms, Reply
from semel.stores.dynamodb.settings import CONNECT_TIMEOUT, RETRY_FOR, TIMEOUT, DynamoDBSettings
from semel.stores.dynamodb.transactions import accept
from semel.stores.settings import require

R = TypeVar("R")


@functools.cache
def _session() -> Any:
    """Return the session of the process: it holds the credentials and the slow-to-read model of the service."""
    return require("botocore.session", "dynamodb").get_session()


_client_lock: Final = threading.Lock()
"""Many threads may use a client, but only one at a time may create one."""


def open_client(settings: DynamoDBSettings) -> Any:
    """Return a client with these settings."""
    config = require("botocore.config", "dynamodb").Config(**settings.config())
    try:
        with _client_lock:
            return _session().create_client(**settings.client(), config=config)
    except Exception as error:
        raise public_error(error_of(error, settings.table)) from error


def migrate(url: str) -> list[str]:
    """Create the table, and have the service remove expired items. Returns what was done."""
    settings = DynamoDBSettings(url)
    client = open_client(settings)
    done = []
    try:
        try:
            client.create_table(**table.create_table_parameters(settings.table))
            done.append(f"table {settings.table}")
        except client.exceptions.ResourceInUseException:
            pass  # it exists, or another process is creating it
        client.get_waiter("table_exists").wait(TableName=settings.table)
        # Check before anything is changed: if this is the name of another table, its items would be removed.
        table.check_key(settings.table, client.describe_table(TableName=settings.table)["Table"])
        time_to_live = client.describe_time_to_live(TableName=settings.table)["TimeToLiveDescription"]
        if not table.has_ttl(settings.table, time_to_live):
            if not done:
                page = client.scan(TableName=settings.table, Limit=1, ConsistentRead=True)
                table.check_items(settings.table, page.get("Items", ()))
            client.update_time_to_live(TableName=settings.table, TimeToLiveSpecification=table.ttl_specification())
            done.append("time to live")
    except SemelError:
        raise
    except Exception as error:
        raise public_error(error_of(error, settings.table)) from error
    finally:
        client.close()
    return done


def check(url: str) -> None:
    """Raise NotMigrated or SchemaDrift unless the table is the one that ``migrate`` creates."""
    settings = DynamoDBSettings(url)
    client = open_client(settings)
    try:
        description = client.describe_table(TableName=settings.table)["Table"]
        time_to_live = client.describe_time_to_live(TableName=settings.table)["TimeToLiveDescription"]
    except Exception as error:
        raise public_error(error_of(error, settings.table)) from error
    finally:
        client.close()
    table.compare(settings.table, description, time_to_live)


def render_template(what: str, url: str) -> str:
    """Return the table of this URL for ``cloudformation`` or ``terraform``, or its rights for ``iam``. Does no I/O."""
    settings = DynamoDBSettings(url)
    return table.template(what, settings.table, settings.region)


class DynamoDBStore:
    """A store in a DynamoDB table, for threads. The client is created when first needed."""

    wakes = False
    counts = False
    resumes = False
    lists = True
    trails = False
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
        :param connect_timeout: how long it may take to connect.
        :param retry_for: how long a call is retried before the Op fails, if it is throttled or gets no response.
        :param clock: seconds since 1970; by default the service's, from the Date headers of its responses.
        """
        self._settings = DynamoDBSettings(url, timeout, connect_timeout, retry_for, clock)
        require("botocore.session", "dynamodb")
        self._programs = DynamoDBPrograms(self._settings.table, self._settings.clock)
        self._client: Any = None
        self._closed = False
        self._reset()
        survive_forks(self._reset)

    def _reset(self) -> None:
        # A child creates a client of its own; the parent's connections are neither used nor closed.
        self._parents_client, self._client = self._client, None
        self._lock = threading.Lock()

    def execute(self, op: Op[R]) -> R:
        program = self._programs.of(op)
        retry = CallRetry(self._settings.retry_for)
        try:
            call = next(program)
            while True:
                call = program.send(self._send(call, retry))
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

    def open(self) -> None:
        self._closed = False

    def close(self) -> None:
        with self._lock:
            self._closed = True
            client, self._client = self._client, None
        if client is not None:
            client.close()

    def _send(self, call: ApiCall, retry: CallRetry) -> Reply:
        """Make a call, and repeat it as ``retry`` says. Returns the reply."""
        settings = self._settings
        while True:
            sent = settings.clock.local()
            try:
                return take_reply(getattr(self._open(), call.action)(**call.params), call, retry, settings, sent)
            except SemelError:
                raise
            except Exception as error:
                answer = take_error(error, call, retry, settings, sent)
            if not isinstance(answer, float):
                return answer
            time.sleep(answer)

    def _open(self) -> Any:
        client = self._client
        if client is None:
            with self._lock:
                if self._closed:
                    raise StoreUnavailable(STORE_CLOSED)
                if self._client is None:
                    self._client = open_client(self._settings)
                client = self._client
        return client
