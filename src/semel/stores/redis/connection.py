"""One connection of a sync store, over redis-py, which handles TLS, login and the choice of the database.

Its twin for event loops, ``aio_connection.py``, is written by hand, because the two work differently: here one thread
at a time writes a batch and reads all replies; there all tasks of a loop share the connection and its writes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from semel.errors import ConfigurationError, MissingDependency, SemelError
from semel.stores.redis.commands import DurableCommand, RedisCommand, UnansweredCommand
from semel.stores.redis.failures import NoScript, connection_lost, error_of_reply, server_unreachable
from semel.stores.redis.handshake import ServerClock, prepare
from semel.stores.redis.settings import Address, RedisSettings

if TYPE_CHECKING:
    from redis.exceptions import ResponseError


def require_redis() -> None:
    """Raise MissingDependency unless redis-py and hiredis are installed."""
    try:
        import redis  # noqa: F401
    except ImportError as error:
        raise MissingDependency("redis", "redis") from error
    try:
        import hiredis  # noqa: F401
    except ImportError as error:
        raise MissingDependency("hiredis", "redis") from error


def connect(settings: RedisSettings, address: Address, *, sentinel: bool = False, timeout: float | None = None) -> Any:
    """Return an open connection of redis-py that is logged in. ``timeout`` replaces both timeouts of the settings."""
    from redis import connection as redis_py
    from redis.exceptions import RedisError, ResponseError

    options: dict[str, Any] = {
        "username": settings.sentinel_username if sentinel else settings.username,
        "password": settings.sentinel_password if sentinel else settings.password,
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

    def __init__(self, settings: RedisSettings, address: Address, wait: RedisCommand | None = None) -> None:
        """
        :param wait: the command that confirms writes; without it nothing is confirmed.
        """
        self.address = address
        self.clock = ServerClock()
        self._wait = wait
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
        unknown = [i for i, reply in enumerate(replies) if isinstance(_first(reply), NoScript)]
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
        if self._wait is None or not any(type(command) is DurableCommand for command in commands):
            replies = self._exchange(sent)
            return replies[1::2] if asking else replies
        *replies, confirmation = self._exchange([*sent, self._wait])
        pairs = zip(commands, replies[1::2] if asking else replies, strict=True)
        return [(reply, confirmation) if type(command) is DurableCommand else reply for command, reply in pairs]

    def _write(self, commands: Sequence[RedisCommand]) -> None:
        self._raw.send_packed_command(
            self._raw.pack_commands([command.parts for command in commands]), check_health=False
        )

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
                    replies.append(_error_of(error))
        except (RedisError, OSError) as error:
            self.close()
            for _ in range(len(replies), len(commands)):
                trouble = connection_lost(str(self.address), str(error))
                trouble.__cause__ = error
                replies.append(trouble)
        except BaseException:  # interrupted: the next batch would take the unread replies for its own
            self.close()
            raise
        return replies

    def close(self) -> None:
        self.closed = True
        self._raw.disconnect()


def _first(reply: Any) -> Any:
    return reply[0] if isinstance(reply, tuple) else reply


def _error_of(error: ResponseError) -> SemelError:
    result = error_of_reply(reply_text(error))
    result.__cause__ = error
    return result
