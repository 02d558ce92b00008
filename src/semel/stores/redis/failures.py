"""Error replies and lost connections as errors of our own, and which of them are retried.

The errors tell apart what was certainly not stored, what may have been stored, and what is worth a retry. A command
that is answered by an error was not carried out: our scripts check before they write, and write once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar

from semel.core.ops import Op, Resolve
from semel.errors import ConfigurationError, SemelError, StoreError, StoreUnavailable, StoreUncertain
from semel.stores.redis.layout import NOT_A_RECORD
from semel.stores.retries import Backoff, public_error

E = TypeVar("E", bound=SemelError)


class ConnectionLost(StoreUncertain):
    """The command was sent, and the connection broke before the reply."""


class ServerUnreachable(StoreUnavailable):
    """Nothing was carried out. The same command may be sent again in a moment."""


class NotMaster(ServerUnreachable):
    """This server takes no writes: look for the one that does."""


class CommandRefused(StoreUnavailable):
    """The server refused the command, and would refuse it again."""


class NoMemory(CommandRefused):
    """The server is full and takes no writes. Reading is still possible."""


class NoScript(StoreUnavailable):
    """The server does not know the script: send it in full."""


class Unconfirmed(StoreUnavailable):
    """WAIT or WAITAOF was refused. The command before it has written, so the caller gets StoreUncertain."""


class Moved(StoreUnavailable):
    """Another node of the cluster has the slot; with ``asking``, for this command only."""

    def __init__(self, text: str, slot: int, host: str, port: int, asking: bool) -> None:
        super().__init__(text)
        self.slot = slot
        self.host = host
        self.port = port
        self.asking = asking


_KINDS: Final[dict[str, tuple[Callable[[str], SemelError], str]]] = {
    "NOSCRIPT": (NoScript, "Redis does not know a script"),
    "READONLY": (NotMaster, "Redis takes no writes: it is a replica"),
    "MASTERDOWN": (NotMaster, "Redis has lost its master"),
    "LOADING": (ServerUnreachable, "Redis is loading its data"),
    "BUSY": (ServerUnreachable, "Redis is busy with a script"),
    "CLUSTERDOWN": (NotMaster, "the Redis Cluster is down, or does not cover all slots"),
    "TRYAGAIN": (ServerUnreachable, "the Redis Cluster is moving the slot"),
    "UNBLOCKED": (Unconfirmed, "Redis has it, but stopped waiting for its replicas"),
    "OOM": (NoMemory, "Redis has no memory left and refuses to write"),
    "MISCONF": (CommandRefused, "Redis cannot save to disk and refuses to write"),
    "NOREPLICAS": (CommandRefused, "Redis has too few replicas and refuses to write"),
    "NOAUTH": (CommandRefused, "Redis asks for a password: put it into the URL"),
    "WRONGPASS": (CommandRefused, "Redis does not know this user and password"),
    "NOPERM": (CommandRefused, "Redis does not allow this user what Semel needs: see the page on Redis"),
    "WRONGTYPE": (ConfigurationError, NOT_A_RECORD),
    "CROSSSLOT": (CommandRefused, "Redis refused the keys of one command"),
}


def error_of_reply(text: str) -> SemelError:
    """Return the error that an error reply means."""
    code, _, rest = text.partition(" ")
    if code in ("MOVED", "ASK"):
        slot, _, address = rest.partition(" ")
        host, _, port = address.rpartition(":")
        return Moved(f"the Redis Cluster has moved the slot: {rest}", int(slot), host, int(port), code == "ASK")
    kind, words = _KINDS.get(code, (CommandRefused, "Redis refused the command"))
    message = text.removeprefix("ERR ")  # redis-py has removed it already
    if message.startswith("unknown command") and "sentinel" in message[:40].lower():
        words = "this server is no sentinel: write redis:// for a single server"
    elif message.startswith("This instance has cluster support disabled"):
        words = "this server is no node of a Redis Cluster: write redis:// for a single server"
    elif message.startswith("unknown command"):
        words = "Redis does not know the command: Semel needs Redis 7.0 or newer, or Valkey"
    elif message.startswith("syntax error"):
        words = "Redis does not know SET with NX and GET: Semel needs Redis 7.0 or newer, or Valkey"
    elif message.startswith(("WAIT ", "WAITAOF ")):
        kind, words = Unconfirmed, "Redis cannot confirm the write"
    return kind(f"{words} ({_short(text)})")


def with_cause(error: E, cause: BaseException | None) -> E:
    """Return the error, with what caused it."""
    error.__cause__ = cause
    return error


def unconfirmed(error: SemelError) -> StoreError:
    """Return the error for a write whose WAIT failed: whatever the reason, the write itself was carried out."""
    if isinstance(error, (StoreUncertain, Unconfirmed)):
        return error
    return with_cause(Unconfirmed(f"not confirmed: {error}"), error.__cause__ or error)


def with_answer(error: StoreError) -> StoreError:
    """Return a copy for an Op that found a stored result: nothing may be run in its place.

    It is a copy because all who share a WAIT share its error, and the others have found no result.
    """
    result = type(error)(str(error))
    result.answered = True
    return result


def server_unreachable(where: str, error: BaseException) -> ServerUnreachable:
    """Return the error for a connection that could not be opened."""
    return ServerUnreachable(f"Redis at {where} cannot be reached: {_short(str(error)) or type(error).__name__}")


def connection_lost(where: str, why: str) -> ConnectionLost:
    """Return the error for a command that was sent and got no reply."""
    return ConnectionLost(f"the connection to Redis at {where} was lost before the answer: {_short(why)}")


def _short(text: str) -> str:
    return " ".join(text.split())[:300]


MAX_REDIRECTIONS: Final = 16
"""How many redirections one Op follows."""


class OpRetry:
    """How often one Op is tried: until it is answered or refused, or ``retry_for`` seconds are over.

    It is created when the first error comes, so an Op that succeeds does not pay for it.
    """

    __slots__ = ("_answered", "_backoff", "_op", "_redirections", "_sent")

    def __init__(self, op: Op[Any], retry_for: float) -> None:
        self._op = op
        self._backoff = Backoff(retry_for)
        self._redirections = 0
        self._sent = False
        self._answered = False

    def pause_after(self, error: SemelError) -> float | None:
        """Return the seconds to wait before the next try, or None to give up."""
        if isinstance(error, StoreError) and error.answered:
            self._answered = True
        if isinstance(error, Moved):
            self._redirections += 1
            return 0.0 if self._redirections <= MAX_REDIRECTIONS else None
        if isinstance(error, (StoreUncertain, Unconfirmed)):
            self._sent = True
            if type(self._op) is Resolve:
                return None  # a Resolve must not be sent twice: by then the record may belong to another owner
        elif not isinstance(error, ServerUnreachable):
            return None
        return self._backoff.next_pause()

    def failure(self, error: SemelError) -> SemelError:
        """Return the error for the caller."""
        result = public_error(error, self._sent)
        if isinstance(result, StoreError):
            result.answered = self._answered
        return result
