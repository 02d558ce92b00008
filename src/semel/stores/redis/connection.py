"""The connections of a sync store, over redis-py, which handles TLS, login and the choice of the database.

``aio_connection.py`` is the same for event loops. Both are written by hand, because they work differently. Here one
thread at a time writes a batch and reads all replies, and one of them searches for the servers while the others wait.
There all tasks of a loop share a connection and its writes, and one task searches for all. What a search asks, and what
the replies mean, is in ``topology.py``.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from typing import Any

from semel.engine.forking import survive_forks
from semel.errors import ConfigurationError, StoreError
from semel.stores.redis.commands import DurableCommand, RedisCommand, ServerClock, UnansweredCommand, prepare
from semel.stores.redis.failures import (
    NoScript,
    connection_lost,
    error_of_reply,
    server_unreachable,
    with_cause,
)
from semel.stores.redis.risks import QUESTIONS, RiskLog
from semel.stores.redis.settings import Address, RedisSettings
from semel.stores.redis.topology import SearchTime, Topology, topology_of
from semel.stores.risks import Risk
from semel.stores.settings import require


def require_redis() -> None:
    """Raise MissingDependency unless redis-py and hiredis are installed."""
    for package in ("redis", "hiredis"):
        require(package, "redis")


def connect(settings: RedisSettings, address: Address, *, sentinel: bool = False, timeout: float | None = None) -> Any:
    """Return an open connection of redis-py that is logged in. ``timeout`` replaces both timeouts of the settings."""
    from redis import connection as redis_py
    from redis.exceptions import RedisError, ResponseError

    username, password = settings.credentials(sentinel)
    options: dict[str, Any] = {
        "username": username,
        "password": password,
        "db": 0 if sentinel else settings.db,
        "client_name": "semel",
        "socket_timeout": timeout or settings.timeout,
        "socket_connect_timeout": timeout or settings.connect_timeout,
        "protocol": 2,
    }
    kind: Any = redis_py.Connection
    if not address.port:
        kind, options["path"] = redis_py.UnixDomainSocketConnection, address.host
    else:
        options.update(host=address.host, port=address.port)
        if settings.tls:
            kind = redis_py.SSLConnection
            options.update({f"ssl_{name}": value for name, value in settings.ssl.items()})
    try:
        raw = kind(**options)
        raw.connect()
    except ResponseError as error:
        raise error_of_reply(reply_text(error)) from error
    except (RedisError, OSError, UnicodeError, OverflowError) as error:  # the last two: no valid host name or port
        if reply_text(error).partition(" ")[0] in ("NOAUTH", "WRONGPASS"):
            raise error_of_reply(reply_text(error)) from error
        raise server_unreachable(str(address), error) from error
    except ValueError as error:
        raise ConfigurationError(f"the TLS settings of the Redis URL cannot be used: {error}") from error
    return raw


def reply_text(error: BaseException) -> str:
    """Return an error reply as the server sent it: redis-py removes the code of those that it has a class for."""
    from redis import exceptions as known

    codes: dict[type[Exception], str] = {
        known.NoScriptError: "NOSCRIPT", known.ReadOnlyError: "READONLY", known.BusyLoadingError: "LOADING",
        known.MovedError: "MOVED", known.AskError: "ASK", known.TryAgainError: "TRYAGAIN",
        known.MasterDownError: "MASTERDOWN", known.ClusterDownError: "CLUSTERDOWN", known.OutOfMemoryError: "OOM",
        known.NoPermissionError: "NOPERM", known.AuthenticationError: "WRONGPASS",
        known.ClusterCrossSlotError: "CROSSSLOT",
    }  # fmt: skip
    code = codes.get(type(error))  # type: ignore[arg-type]
    if code == "WRONGPASS" and "Authentication required" in str(error):
        code = "NOAUTH"  # redis-py has one class for both
    return f"{code} {error}" if code else str(error)


class RedisConnection:
    """An open connection to one server, and an estimate of the server's clock. One thread at a time uses it."""

    def __init__(self, settings: RedisSettings, address: Address) -> None:
        self.address = address
        self.clock = ServerClock()
        self._wait = RedisCommand(settings.wait_command)
        self._unread = 0
        """Replies that nobody waits for and that have not been read yet."""
        self._raw = connect(settings, address)
        self.closed = False
        self.stale = False
        """Not to be used again. Another thread may set this, but must not close the connection."""
        handshake = prepare(settings, self.clock)
        try:
            commands = next(handshake)
            while True:
                commands = handshake.send(self._exchange(commands))
        except StopIteration:
            return
        except BaseException:
            self.close()
            raise

    def exchange(self, commands: Sequence[RedisCommand], *, asking: bool = False) -> list[Any]:
        """Write all commands, then read all replies, in one round trip. Errors are replies, too.

        :param asking: send ASKING before each command, because its slot is still moving to this node.
        """
        replies = self._exchange_durable(commands, asking)
        unknown = [
            i
            for i, reply in enumerate(replies)
            if isinstance(reply[0] if isinstance(reply, tuple) else reply, NoScript)
        ]
        if unknown and not self.closed:
            again = self._exchange_durable([commands[i].in_full() for i in unknown], asking)
            for i, reply in zip(unknown, again, strict=True):
                replies[i] = reply
        return replies

    def send_unanswered(self, commands: Sequence[UnansweredCommand]) -> None:
        """Write, without waiting. The replies are read, and dropped, in the next exchange."""
        from redis.exceptions import RedisError

        if self.closed:
            return
        try:
            self._write(commands)
        except (RedisError, OSError):
            self.close()
        except BaseException:
            self.close()
            raise
        self._unread += len(commands)

    def _exchange_durable(self, commands: Sequence[RedisCommand], asking: bool) -> list[Any]:
        """Exchange, with one WAIT after all commands. Its reply is paired with the reply to each durable command."""
        sent = list(commands)
        if asking:
            sent = [each for command in commands for each in (RedisCommand((b"ASKING",)), command)]
        if not any(type(command) is DurableCommand for command in commands):
            replies = self._exchange(sent)
            return replies[1::2] if asking else replies
        *replies, confirmation = self._exchange([*sent, self._wait])
        pairs = zip(commands, replies[1::2] if asking else replies, strict=True)
        return [(reply, confirmation) if type(command) is DurableCommand else reply for command, reply in pairs]

    def _write(self, commands: Sequence[RedisCommand]) -> None:
        packed: list[bytes] = []
        for command in commands:
            if isinstance(command.parts, bytes):
                packed.append(command.parts)
            else:
                packed += self._raw.pack_command(*command.parts)
        self._raw.send_packed_command([b"".join(packed)], check_health=False)

    def _exchange(self, commands: Sequence[RedisCommand]) -> list[Any]:
        from redis.exceptions import RedisError, ResponseError

        replies: list[Any] = []
        if self.closed:  # redis-py would open it again, and WAIT would not cover what was written before
            return [connection_lost(str(self.address), "it is closed") for _ in commands]
        try:
            self._write(commands)
            while self._unread:
                with contextlib.suppress(ResponseError):
                    self._raw.read_response(disable_decoding=True)
                self._unread -= 1
            for _ in commands:
                try:
                    replies.append(self._raw.read_response(disable_decoding=True))
                except ResponseError as error:
                    replies.append(with_cause(error_of_reply(reply_text(error)), error))
        except (RedisError, OSError) as error:
            self.close()
            for _ in range(len(replies), len(commands)):
                replies.append(with_cause(connection_lost(str(self.address), str(error)), error))
        except BaseException:  # interrupted: the next batch would take the unread replies for its own
            self.close()
            raise
        return replies

    def close(self) -> None:
        self.closed = True
        self._raw.disconnect()


class Servers:
    """What all connections of a store share: where the servers are, which are down, and which risks were logged."""

    def __init__(self, settings: RedisSettings) -> None:
        self.settings = settings
        self.topology: Topology = topology_of(settings)
        self.cursors: dict[Address, bytes] = {}
        """Where the next sweep of each server continues."""
        self.down: set[Address | None] = set()
        """Servers that a caller has retried in vain: later callers try them once, and do not wait."""
        self._risks = RiskLog(settings)
        self._assessed: set[Address] = set()
        self._searches = 0
        self._failure: StoreError | None = None
        """The error of the last search, for those who waited for it: they need not search in vain again."""
        self._renew_lock()
        survive_forks(self._renew_lock)

    def _renew_lock(self) -> None:
        self._lock = threading.Lock()

    def address_of(self, key: bytes) -> Address:
        """Return the server that has the key, after a search if need be."""
        if self.topology.address_of(key) is None:
            self.search()
        return self.topology.require_address(key)

    def masters(self) -> list[Address]:
        """Return all servers that take writes, after a search if need be."""
        if not self.topology.masters():
            self.search()
        return self.topology.masters()

    def search(self) -> None:
        """Find the servers. Threads that call this while another searches wait for its result, or share its error."""
        searches = self._searches
        with self._lock:
            if self.topology.masters():
                return  # another thread has found them meanwhile
            if self._searches != searches and self._failure is not None:
                raise type(self._failure)(str(self._failure)) from self._failure.__cause__
            self._failure = None
            search, time = self.topology.search(), SearchTime(self.settings.connect_timeout)
            try:
                address, command, left = next(search)
                while True:
                    address, command, left = search.send(self._ask(address, command, time.share(left)))
            except StopIteration:
                self.down.discard(None)
            except StoreError as error:
                self._failure = error
                raise
            finally:
                self._searches += 1

    def _ask(self, address: Address, command: tuple[bytes, ...], timeout: float) -> Any:
        """Send one command over a connection of its own. Returns the reply, or the error as a value."""
        from redis.exceptions import AuthenticationError, RedisError, ResponseError

        try:
            raw: Any = connect(self.settings, address, sentinel=self.topology.sentinels, timeout=timeout)
        except StoreError as error:
            return error
        try:
            raw.send_command(*command)
            return raw.read_response(disable_decoding=True) or ()
        except (ResponseError, AuthenticationError) as error:
            return with_cause(error_of_reply(reply_text(error)), error)
        except (RedisError, OSError) as error:
            return with_cause(server_unreachable(str(address), error), error)
        finally:
            raw.disconnect()

    def assess_once(self, connection: RedisConnection) -> None:
        """Log the risks of a server if this store has not been connected to it before."""
        if connection.address not in self._assessed:
            self._assessed.add(connection.address)
            self.assess(connection)

    def assess(self, connection: RedisConnection) -> list[Risk]:
        """Return the risks of a server; new ones are logged."""
        asked = time.time()
        replies = connection.exchange(QUESTIONS)
        return self._risks.report(replies, asked, time.time())
