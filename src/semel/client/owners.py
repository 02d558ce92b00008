"""What a journal needs of the operating system: which processes are alive, and whether the disk is a local one.

A process that uses a journal holds a lock on one byte of the file ``…-owners``, at the position of its number. The
operating system drops the lock when the process dies. Nothing here knows what is in a journal.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections import Counter
from typing import Final

from semel.engine.forking import survive_forks
from semel.engine.operation.handle import ForkSafeLock
from semel.errors import ConfigurationError

NETWORK_FILE_SYSTEMS: Final = ("nfs", "cifs", "smb", "afs", "9p", "fuse.sshfs")


class Presence:
    """This process, as the owner of entries in one file. All ``Journal`` objects of the file share it."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.users = 0
        self.lock = threading.Lock()
        self.in_flight: Counter[int] = Counter()
        """Calls of this process that wait for an answer, by the id of their entry."""
        self._enter()
        survive_forks(self._forked)

    def _enter(self) -> None:
        import fcntl

        # Never opened twice by one process: closing one of two would drop the locks of both.
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self.owner = secrets.randbits(62)
        fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, self.owner)

    def _forked(self) -> None:
        # The locks and the calls in flight are the parent's. Closing our copy of its file does not drop its locks.
        self.lock = threading.Lock()
        self.in_flight = Counter()
        if self._file >= 0:
            os.close(self._file)
            self._enter()

    def alive(self, owner: int) -> bool:
        import fcntl

        if owner == self.owner:
            return True
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, owner)
        except OSError:
            return True
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, owner)
        return False

    def leave(self) -> None:
        """Drop the lock, unless another journal of the same file is open."""
        with _entering.lock:
            self.users -= 1
            if not self.users:
                os.close(self._file)
                self._file = -1  # a forked child must not close what has this number then
                _presences.pop(self.path, None)


_presences: dict[str, Presence] = {}
_entering: Final = ForkSafeLock()


def enter(path: str) -> Presence:
    """Return this process as an owner of the journal's entries. Each call of this needs one of ``Presence.leave``."""
    name = f"{os.path.realpath(path)}-owners"
    with _entering.lock:
        presence = _presences.get(name)
        if presence is None:
            try:
                presence = _presences[name] = Presence(name)
            except OSError as error:
                raise ConfigurationError(f"the journal {path!r} cannot be used: {error}") from error
        presence.users += 1
        return presence


def sync_folder(path: str) -> None:
    """Make the new file's name durable too."""
    folder = os.open(os.path.dirname(path), os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def refuse_network(path: str) -> None:
    """Raise if Linux says that the folder is on a network file system."""
    try:
        device = os.stat(os.path.dirname(path)).st_dev
        with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as mounts:
            lines = [line.split() for line in mounts]
    except OSError:
        return
    for words in lines:
        if words[2] == f"{os.major(device)}:{os.minor(device)}" and "-" in words:
            kind = words[words.index("-") + 1]
            if kind.startswith(NETWORK_FILE_SYSTEMS):
                raise ConfigurationError(
                    f"the journal {path!r} is on a network file system ({kind}), where neither SQLite nor the locks "
                    "of the journal work. Use a local disk."
                )
