"""One connection of a sync store, by redis-py: it opens the line (TLS, password, database); batches go over it."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from semel.errors import ConfigurationError, MissingDependency, SemelError
from semel.stores.redis.clock import ServerClock
from semel.stores.redis.greeting import greet
from semel.stores.redis.replies import NoScript, from_reply, lost, unreachable
from semel.stores.redis.scripts import Command, Kept, Told
from semel.stores.redis.settings import Address, Settings

if TYPE_CHECKING:
    from redis.exceptions import ResponseError

__all__ = ["Link", "connect", "require_redis"]


def require_redis() -> None:
    """The store needs redis-py with hiredis."""
    try:
        import redis  # noqa: F401
    except ImportError as error:
        raise MissingDependency("redis", "redis") from error
    try:
        import hiredis  # noqa: F401
    except ImportError as error:
        raise MissingDependency("hiredis", "redis") from error


def connect(settings: Settings, address: Address, *, sentinel: bool = False, timeout: float | None = None) -> Any:
    """A connection of redis-py that is open, with name, password and database said; ``timeout`` is for one question."""
    from redis import connection as redis_py
    from redis.exceptions import RedisError, ResponseError

    given: dict[str, Any] = {
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
        kind, given["path"] = redis_py.UnixDomainSocketConnection, address.host
    else:
        given.update(host=address.host, port=address.port)
        if settings.tls:
            kind = redis_py.SSLConnection
            given.update({f"ssl_{name}": value for name, value in settings.ssl.items()})
    try:
        made = kind(**given)
        made.connect()
    except ResponseError as error:
        raise from_reply(reply_text(error)) from error
    except (RedisError, OSError, UnicodeError, OverflowError) as error:  # the last two of a name, a port: of no server
        if reply_text(error).partition(" ")[0] in ("NOAUTH", "WRONGPASS"):
            raise from_reply(reply_text(error)) from error
        raise unreachable(str(address), error) from error
    except ValueError as error:
        raise ConfigurationError(f"the TLS settings of the Redis URL cannot be used: {error}") from error
    return made


def reply_text(error: BaseException) -> str:
    """The reply as the server sent it: redis-py takes the code off those it has a class for."""
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
        code = "NOAUTH"  # the two have one class
    return f"{code} {error}" if code else str(error)


class Link:
    """An open line to one server, and what is known of its clock."""

    def __init__(self, settings: Settings, address: Address, barrier: Command | None = None) -> None:
        self.address = address
        self.clock = ServerClock()
        self._barrier = barrier
        self._owed = 0
        """Answers that nobody waits for, and that have not been read yet."""
        self._raw = connect(settings, address)
        self.closed = False
        self.stale = False
        """Not to be used again. Whoever says so may be another thread, and must not close it."""
        greeting = greet(settings, self.clock)
        try:
            commands = next(greeting)
            while True:
                commands = greeting.send(self._exchange(commands))
        except StopIteration:
            return
        except BaseException:
            self.close()
            raise

    def exchange(self, commands: Sequence[Command], *, asking: bool = False) -> list[Any]:
        """One trip: all are written, then all answers are read. An error is an answer, too."""
        replies = self._asked(commands, asking)
        forgotten = [i for i, reply in enumerate(replies) if isinstance(_first(reply), NoScript)]
        if forgotten and not self.closed:
            again = self._asked([commands[i].in_full() for i in forgotten], asking)
            for i, reply in zip(forgotten, again, strict=True):
                replies[i] = reply
        return replies

    def tell(self, commands: Sequence[Told]) -> None:
        """Write, and go on; the answers are read, and dropped, in the next trip."""
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
        self._owed += len(commands)

    def _asked(self, commands: Sequence[Command], asking: bool) -> list[Any]:
        """With ASKING before each, where the slot is still on its way to this node. The barrier goes once, behind
        everything else, and is the answer to all that is kept."""
        sent = list(commands)
        if asking:
            sent = [each for command in commands for each in (Command((b"ASKING",)), command)]
        if self._barrier is None or not any(type(command) is Kept for command in commands):
            replies = self._exchange(sent)
            return replies[1::2] if asking else replies
        *replies, confirmation = self._exchange([*sent, self._barrier])
        pairs = zip(commands, replies[1::2] if asking else replies, strict=True)
        return [(reply, confirmation) if type(command) is Kept else reply for command, reply in pairs]

    def _write(self, commands: Sequence[Command]) -> None:
        self._raw.send_packed_command(
            self._raw.pack_commands([command.parts for command in commands]), check_health=False
        )

    def _exchange(self, commands: Sequence[Command]) -> list[Any]:
        from redis.exceptions import RedisError, ResponseError

        replies: list[Any] = []
        if self.closed:  # redis-py would open it again, and WAIT would know nothing of what was written before
            return [lost(str(self.address), "it is closed") for _ in commands]
        try:
            self._write(commands)
            while self._owed:
                with contextlib.suppress(ResponseError):
                    self._raw.read_response(disable_decoding=True)
                self._owed -= 1
            for _ in commands:
                try:
                    replies.append(self._raw.read_response(disable_decoding=True))
                except ResponseError as error:
                    replies.append(_mapped(error))
        except (RedisError, OSError) as error:
            self.close()
            for _ in range(len(replies), len(commands)):
                trouble = lost(str(self.address), str(error))
                trouble.__cause__ = error
                replies.append(trouble)
        except BaseException:  # interrupted: answers that nobody has read would be taken for those of the next batch
            self.close()
            raise
        return replies

    def close(self) -> None:
        self.closed = True
        self._raw.disconnect()


def _first(reply: Any) -> Any:
    return reply[0] if isinstance(reply, tuple) else reply


def _mapped(error: ResponseError) -> SemelError:
    mapped = from_reply(reply_text(error))
    mapped.__cause__ = error
    return mapped
