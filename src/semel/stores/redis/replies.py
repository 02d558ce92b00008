"""Error replies and lost connections in our words: what is certainly not stored, what may be, what is worth a retry.

A command that is answered by an error was not carried out: our scripts check before they write, and write once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from semel.errors import ConfigurationError, SemelError, StoreError, StoreUnavailable, StoreUncertain

__all__ = [
    "Lost",
    "Moved",
    "NoMemory",
    "NoScript",
    "NotMaster",
    "Refused",
    "Unconfirmed",
    "Unreachable",
    "answered",
    "from_reply",
    "lost",
    "unconfirmed",
    "unreachable",
]


class Lost(StoreUncertain):
    """It was sent, and the connection broke before the answer."""


class Unreachable(StoreUnavailable):
    """Nothing was carried out, and the same may be sent again in a moment."""


class NotMaster(Unreachable):
    """This server takes no writes: look for the one that does."""


class Refused(StoreUnavailable):
    """The server said no, and will say no again."""


class NoMemory(Refused):
    """The server is full, and takes no writes; reading is still possible."""


class NoScript(StoreUnavailable):
    """The server has forgotten the script: send it in full."""


class Unconfirmed(StoreUnavailable):
    """WAIT or WAITAOF was refused. What they were asked behind is written, so a caller is told that it is uncertain."""


class Moved(StoreUnavailable):
    """Another node of the cluster has the slot; with ``asking``, for this once only."""

    def __init__(self, text: str, slot: int, host: str, port: int, asking: bool) -> None:
        super().__init__(text)
        self.slot = slot
        self.host = host
        self.port = port
        self.asking = asking


_KINDS: Final[dict[str, tuple[Callable[[str], SemelError], str]]] = {
    "NOSCRIPT": (NoScript, "Redis has forgotten a script"),
    "READONLY": (NotMaster, "Redis takes no writes: it is a replica"),
    "MASTERDOWN": (NotMaster, "Redis has lost its master"),
    "LOADING": (Unreachable, "Redis is loading its data"),
    "BUSY": (Unreachable, "Redis is busy with a script"),
    "CLUSTERDOWN": (NotMaster, "the Redis Cluster is down, or does not cover all slots"),
    "TRYAGAIN": (Unreachable, "the Redis Cluster is moving the slot"),
    "UNBLOCKED": (Unconfirmed, "Redis has it, but stopped waiting for its replicas"),
    "OOM": (NoMemory, "Redis has no memory left, and refuses to write"),
    "MISCONF": (Refused, "Redis cannot save to disk, and refuses to write"),
    "NOREPLICAS": (Refused, "Redis has too few replicas, and refuses to write"),
    "NOAUTH": (Refused, "Redis asks for a password: put it into the URL"),
    "WRONGPASS": (Refused, "Redis does not know this user and password"),
    "NOPERM": (Refused, "Redis does not allow this user what Semel needs: see the page on Redis"),
    "WRONGTYPE": (
        ConfigurationError,
        "a key of the store holds something else: give Semel a prefix of its own, RedisStore(url, prefix=…)",
    ),
    "CROSSSLOT": (Refused, "Redis refused the keys of one command"),
}


def from_reply(text: str) -> SemelError:
    """The error of an error reply."""
    code, _, rest = text.partition(" ")
    if code in ("MOVED", "ASK"):
        slot, _, address = rest.partition(" ")
        host, _, port = address.rpartition(":")
        return Moved(f"the Redis Cluster has moved the slot: {rest}", int(slot), host, int(port), code == "ASK")
    kind, words = _KINDS.get(code, (Refused, "Redis refused it"))
    said = text.removeprefix("ERR ")  # redis-py has cut it off already
    if said.startswith("unknown command") and "sentinel" in said[:40].lower():
        words = "this server is no sentinel: write redis:// for a single server"
    elif said.startswith("This instance has cluster support disabled"):
        words = "this server is no node of a Redis Cluster: write redis:// for a single server"
    elif said.startswith("unknown command"):
        words = "Redis does not know the command: Semel needs Redis 7.0 or newer, or Valkey"
    elif said.startswith("syntax error"):
        words = "Redis does not know SET with NX and GET: Semel needs Redis 7.0 or newer, or Valkey"
    elif said.startswith(("WAIT ", "WAITAOF ")):
        kind, words = Unconfirmed, "Redis cannot confirm what it has"
    return kind(f"{words} ({_short(text)})")


def unconfirmed(error: SemelError) -> StoreError:
    """What a barrier was refused with: whatever it is, the command before it was carried out."""
    if isinstance(error, (StoreUncertain, Unconfirmed)):
        return error
    told = Unconfirmed(f"not confirmed: {error}")
    told.__cause__ = error.__cause__ or error
    return told


def answered(error: StoreError) -> StoreError:
    """The same of an Op whose answer was found: nothing may be run in its place. Made anew, for a barrier has one error
    for all who share it, and others among them have no answer."""
    told = type(error)(str(error))
    told.answered = True
    return told


def unreachable(where: str, error: BaseException) -> Unreachable:
    """No connection could be opened."""
    return Unreachable(f"Redis at {where} cannot be reached: {_short(str(error)) or type(error).__name__}")


def lost(where: str, why: str) -> Lost:
    """It was sent, and no answer came."""
    return Lost(f"the connection to Redis at {where} was lost before the answer: {_short(why)}")


def _short(text: str) -> str:
    return " ".join(text.split())[:300]
