"""What all kinds of servers have in common: finding, starting, knowing it is ready, stopping, and the log.

A kind says what it is (class attributes) and writes `command` and `ready`, `prepare` if it needs a set-up once. A kind
of several processes is a Server that overrides `start` and `stop` and owns other Servers.
"""

from __future__ import annotations

import atexit
import glob
import os
import pwd
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, ClassVar, Self

LOOPBACK = "127.0.0.1"


class ServerError(Exception):
    """A server did not start, or was used while it does not run."""


class ServerMissing(ServerError):
    """The programs of a kind are not on this machine; the text names what to install."""


class Server(ABC):
    """One server of one kind, in a temporary folder of its own. A context manager; it can be started again."""

    name: ClassVar[str]
    binaries: ClassVar[tuple[str, ...]]  # all of them, in one folder
    search: ClassVar[tuple[str, ...]] = ()  # folders (globs) looked into before PATH; the highest version wins
    packages: ClassVar[tuple[str, ...]]  # what the system's package manager calls it
    users: ClassVar[tuple[str, ...]] = ()  # for a server that refuses root: the first of these that exists
    stop_signal: ClassVar[signal.Signals] = signal.SIGTERM
    costly: ClassVar[bool] = False  # to start, or while it idles: of several workers one has it, and runs all its tests
    start_timeout: ClassVar[float] = 90.0
    stop_timeout: ClassVar[float] = 10.0
    port_attempts: ClassVar[int] = 5
    port_taken: ClassVar[str] = "Address already in use"  # a pattern, in the log of a start that lost a port to another

    def __init__(self) -> None:
        self.port = 0
        self.durable = True
        """Whether commits survive a crash of the machine. A crash of the server alone never loses them."""
        self._folder: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._guard: subprocess.Popen[bytes] | None = None
        self._last_log = ""

    # What a kind writes.

    @abstractmethod
    def command(self) -> Sequence[str | Path]:
        """The server's command line, for `self.port` and `self.folder`; it stays in the foreground."""

    @abstractmethod
    def ready(self) -> bool:
        """Whether the process just started (and not another one on that port) accepts work."""

    def prepare(self) -> None:
        """Make the data folder, once in this server's life; a kind that needs none leaves this as it is."""
        return

    # What it is made of.

    @classmethod
    def find(cls) -> Path | None:
        """The folder that holds all binaries of this kind, or None."""
        known = (sorted(glob.glob(pattern), key=_version, reverse=True) for pattern in cls.search)
        folders = [folder for found in known for folder in found] + os.get_exec_path()
        for folder in folders:
            if all(os.access(Path(folder, binary), os.X_OK) for binary in cls.binaries):
                return Path(folder)
        return None

    @classmethod
    def fetch(cls) -> None:
        """Get what no package of the system has; ServerMissing where that fails. Most kinds need nothing."""
        return

    @classmethod
    def binary(cls, name: str) -> Path:
        """The path of one binary; ServerMissing when this kind is not installed."""
        folder = cls.find()
        if folder is None:
            wanted = " ".join(cls.packages)
            raise ServerMissing(f"{cls.name} is not installed: no {', '.join(cls.binaries)}; install: {wanted}")
        return folder / name

    @property
    def folder(self) -> Path:
        if self._folder is None:
            raise ServerError(f"{self.name} has no folder: it was not started")
        return self._folder

    @property
    def log(self) -> Path:
        return self.folder / "server.log"

    @property
    def pid(self) -> int | None:
        """The process id while it runs."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    # Its life.

    def start(self) -> None:
        """Start on a free port; when another process takes it first, on another one."""
        if self._process is not None:
            raise ServerError(f"{self.name} runs already")
        self.binary(self.binaries[0])
        if self._folder is None:
            self._folder = _temporary_folder(self.name, self._account())
            atexit.register(self._stop_at_exit, os.getpid())
            try:
                self.prepare()
            except BaseException:
                self.stop()
                raise
        try:
            for _ in range(self.port_attempts):
                self.port = free_port()
                if self._launch():
                    return
        except BaseException:
            self.stop()
            raise
        log = self.log_tail()
        self.stop()
        raise ServerError(f"{self.name}: lost its port {self.port_attempts} times\n{log}")

    def stop(self) -> None:
        """End the process and remove the folder. Harmless when it does not run."""
        self._halt(self.stop_signal)
        atexit.unregister(self._stop_at_exit)
        if self._folder is not None:
            self._last_log = self.log_tail()
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def restart_with(self, how: signal.Signals) -> None:
        """End the process by that signal and start it again: same port, same data."""
        self.folder  # noqa: B018 - a server that was never started has nothing to restart
        self._halt(how)
        self.return_()

    def crash(self) -> None:
        """SIGKILL, and stay away."""
        self._halt(signal.SIGKILL)

    def return_(self) -> None:
        """Start again after a crash: same port, same data."""
        for _ in range(self.port_attempts):
            if self._launch():
                return
            time.sleep(0.2)  # another process sits on our port; it may be a passing client's own end of a connection
        raise ServerError(f"{self.name}: port {self.port} was taken meanwhile\n{self.log_tail()}")

    def log_tail(self, lines: int = 40) -> str:
        """The last lines of the log, also after the end."""
        if self._folder is None:
            return self._last_log
        if not self.log.exists():
            return ""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    # How.

    def run(self, command: Sequence[str | Path]) -> None:
        """Run a set-up command to its end, as the server's user; its output goes to the log."""
        with self.log.open("ab") as log:
            process = self._spawn(command, log)
            try:
                code = process.wait(self.start_timeout)
            except BaseException:
                process.kill()
                process.wait()
                raise
        if code != 0:
            raise ServerError(f"{self.name}: {Path(command[0]).name} ended with {code}\n{self.log_tail()}")

    def environment(self) -> Mapping[str, str]:
        """A small, fixed environment: variables of the developer's shell (PGDATA, …) must not reach the server."""
        path = os.environ.get("PATH", os.defpath)
        return {"PATH": path, "LC_ALL": "C", "TZ": "UTC", "HOME": str(self.folder), "TMPDIR": str(self.folder)}

    def _launch(self) -> bool:
        """Start the process and wait until it is ready; False when the port was taken by another process."""
        seen = self.log.stat().st_size if self.log.exists() else 0
        with self.log.open("ab") as log:
            self._process = process = self._spawn(self.command(), log)
        self._guard = _watch(process.pid, self.stop_signal, self.folder)
        deadline = time.monotonic() + self.start_timeout
        while process.poll() is None:
            if self.ready():
                return True
            if time.monotonic() > deadline:
                self._halt(signal.SIGKILL)
                raise ServerError(f"{self.name}: not ready after {self.start_timeout:g} s\n{self.log_tail()}")
            time.sleep(0.01)
        self._halt(self.stop_signal)
        with self.log.open("rb") as log:
            log.seek(seen)
            if re.search(self.port_taken.encode(), log.read()):
                return False
        raise ServerError(f"{self.name}: ended with {process.returncode} while it started\n{self.log_tail()}")

    def _halt(self, how: signal.Signals) -> None:
        process, guard = self._process, self._guard
        if process is not None:
            process.send_signal(how)  # does nothing when it has ended
            try:
                process.wait(self.stop_timeout)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if guard is not None:
            guard.communicate(b"\n")
        self._process = self._guard = None

    def _stop_at_exit(self, owner: int) -> None:
        if os.getpid() == owner:  # a test may fork, and the child must not stop its parent's server
            self.stop()

    def _spawn(self, command: Sequence[str | Path], log: IO[bytes]) -> subprocess.Popen[bytes]:
        account = self._account()
        return subprocess.Popen(
            [str(word) for word in command],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=self.folder,
            env=dict(self.environment()),
            user=account.pw_uid if account else None,
            group=account.pw_gid if account else None,
            extra_groups=[] if account else None,
            process_group=0,  # Ctrl-C is for the test session, which then stops the servers
        )

    @classmethod
    def _account(cls) -> pwd.struct_passwd | None:
        """Whom to run as, None for ourselves."""
        if os.geteuid() != 0 or not cls.users:
            return None
        for user in cls.users:
            try:
                return pwd.getpwnam(user)
            except KeyError:
                continue
        raise ServerError(f"{cls.name} does not run as root, and there is no user {' or '.join(cls.users)}")


def free_port() -> int:
    """A loopback port that was free a moment ago."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((LOOPBACK, 0))
        port: int = probe.getsockname()[1]
        return port


# Waits for a line. If the pipe closes instead, our process died without stopping the server: end it, remove its folder.
_GUARD = """
read -r _ && exit 0
kill -s "$1" "$2" 2>/dev/null
for _ in 1 2 3 4 5 6 7 8 9 10; do kill -0 "$2" 2>/dev/null || break; sleep 0.5; done
kill -s KILL "$2" 2>/dev/null
rm -rf -- "$3"
"""


def _watch(pid: int, how: signal.Signals, folder: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        ["sh", "-c", _GUARD, "guard", how.name.removeprefix("SIG"), str(pid), str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        process_group=0,
    )


def _temporary_folder(name: str, account: pwd.struct_passwd | None) -> Path:
    """A new folder that belongs to the server's user, below a temporary folder which that user can reach."""
    bases = [Path(tempfile.gettempdir()), Path("/tmp"), Path("/var/tmp")]
    base = next((base for base in bases if account is None or _open_to_all(base)), bases[0])
    folder = Path(tempfile.mkdtemp(prefix=f"semel-{name}-", dir=base))
    if account is not None:
        os.chown(folder, account.pw_uid, account.pw_gid)
    return folder


def _open_to_all(folder: Path) -> bool:
    folder = folder.resolve()
    return folder.is_dir() and all(step.stat().st_mode & 0o001 for step in (folder, *folder.parents))


def _version(folder: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", folder)]
