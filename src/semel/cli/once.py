"""``semel once``: run any command once for its key, and replay its output and exit code.

The command runs as a handler of a guard, under a lease that is renewed while it runs. On Linux it is killed when this
process dies: the lease ends then, another process may take over, and two runs must not overlap.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from contextlib import ExitStack, suppress
from types import FrameType
from typing import TYPE_CHECKING, Any, BinaryIO, Final, Self

from semel.cli.commands import Command, add_url, as_json, say
from semel.errors import (
    InProgress,
    KeyExpired,
    KeyReused,
    OutcomeUnknown,
    PolicyError,
    ResultNotStored,
    SemelError,
)

if TYPE_CHECKING:
    from semel.engine.operation import Operation

REUSED: Final = 65
"""The key was used for another command, or has expired."""
BUSY: Final = 75
"""Another process runs it now: try again later."""
DOUBTFUL: Final = 76
"""An earlier run ended without an outcome, and may not be repeated: ``semel release`` or ``semel resolve`` it. Or
it is done, and the store could not take its outcome.
"""
NOT_RUN: Final = 125
"""Semel failed, and the command was not run: the store could not be reached, or a setting is wrong."""
NOT_EXECUTABLE: Final = 126
"""The command cannot be started. That is never remembered."""
NOT_FOUND: Final = 127
"""There is no such command. That is never remembered."""
_FORWARDED: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_BY_THE_TERMINAL: Final = (signal.SIGINT, signal.SIGQUIT)
"""Signals that a terminal sends to the command as well."""
_CHUNK: Final = 65_536
_MOST_OUTPUT: Final = 32_000_000
"""Bytes. A store takes no more than the limit of the codec, 64 MiB, and bytes grow when they are stored."""
_LINGER: Final = 2.0
"""Seconds to wait for the end of the output when the command has ended and a process that it left behind has not."""
_SWEPT: Final = 100
_SET_PARENT_DEATH_SIGNAL: Final = 1
"""PR_SET_PDEATHSIG of prctl(2)."""


def configure(parser: argparse.ArgumentParser) -> None:
    add_url(parser)
    parser.add_argument(
        "--key",
        required=True,
        metavar="K",
        help="the command runs once for this key; with another command line the key is refused",
    )
    parser.add_argument("--operation", default="once", metavar="NAME", help="the name of the operation (default: once)")
    parser.add_argument("--tenant", default="", metavar="T", help="the tenant that the key belongs to (default: none)")
    parser.add_argument(
        "--ttl", default="24h", metavar="D", help="how long it is remembered: 30d, forever (default: 24h)"
    )
    parser.add_argument(
        "--lease",
        default="30s",
        metavar="D",
        help="how long a run counts as alive after its process has died (default: 30s)",
    )
    parser.add_argument(
        "--wait",
        metavar="D",
        help=f"wait so long for a run elsewhere, and replay it; without it, exit with {BUSY} at once",
    )
    parser.add_argument(
        "--guarantee", default="effectively-once", choices=["effectively-once", "at-most-once", "at-least-once"],
        help="effectively-once: a run that was killed is repeated. at-most-once: it is never repeated, and failures "
        "are remembered. at-least-once: as the first, and the command also runs if the store is down "
        "(default: effectively-once)",
    )  # fmt: skip
    parser.add_argument(
        "--remember-failures",
        action="store_true",
        help="remember exit codes other than 0, too; otherwise the next run repeats the command",
    )
    parser.add_argument(
        "--max-output",
        default="1MB",
        metavar="SIZE",
        help="how much of the output is remembered, at most 32MB; a replay says if there was more (default: 1MB)",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the output")
    parser.set_defaults(command=[])


class _Failed(Exception):
    """The command failed, and that is not to be remembered: the key is free again."""

    def __init__(self, result: dict[str, Any]) -> None:
        super().__init__(f"exit code {result['code']}")
        self.result = result


def run(args: argparse.Namespace) -> int:
    from semel.core.policy import Wait
    from semel.stores.guard import Semel
    from semel.stores.sizing import bytes_in
    from semel.stores.urls import open_store

    if not args.command:
        raise PolicyError("say what to run, after two dashes: semel once URL --key K -- command …")
    max_output = bytes_in(args.max_output)
    if max_output > _MOST_OUTPUT:
        raise PolicyError(f"--max-output is at most {_MOST_OUTPUT // 10**6}MB: let the command write more into a file")
    runner = _Runner(args.command, max_output, quiet=args.json)
    at_most_once = args.guarantee == "at-most-once"
    remembers = args.remember_failures or at_most_once

    def handler(op: Operation) -> dict[str, Any]:
        result = runner.run({"SEMEL_KEY": args.key, "SEMEL_ATTEMPT": str(op.attempt)})
        if not runner.started or (result["code"] and not remembers):
            raise _Failed(result)
        return result

    try:
        with runner, Semel(open_store(args.url), sweep_every=None) as guard:
            try:
                outcome = guard.run_outcome(
                    args.operation,
                    key=args.key,
                    tenant=args.tenant or None,
                    fingerprint={"command": args.command},
                    call=handler,
                    guarantee=args.guarantee.replace("-", "_"),
                    ttl=None if args.ttl == "forever" else args.ttl,
                    lease=args.lease,
                    on_duplicate="raise" if args.wait is None else Wait(args.wait),
                    completion_timeout="30s",
                )
            except _Failed:
                if at_most_once and not runner.started:  # it remembers every failure, but here nothing has run
                    guard.release(args.operation, args.key, tenant=args.tenant or None, stored="any")
                raise
            with suppress(SemelError):  # nobody else may sweep a store that only commands use
                guard.sweep(_SWEPT)
    except _Failed as failed:
        return _report(args, failed.result, replayed=False, ran=True)
    except KeyReused:
        say(f"semel: {args.operation}[{args.key}]: this key was used for another command", sys.stderr)
        return REUSED
    except ResultNotStored as error:
        say(f"semel: {error}", sys.stderr)
        return DOUBTFUL if error.result is None else _report(args, error.result, replayed=False, ran=True)
    except SemelError as error:
        say(f"semel: {error}", sys.stderr)
        return DOUBTFUL if runner.started else _exit_code(error)
    return _report(args, outcome.value, outcome.replayed, runner.ran)


def _exit_code(error: SemelError) -> int:
    if isinstance(error, InProgress):
        return BUSY
    if isinstance(error, OutcomeUnknown):
        return DOUBTFUL
    return REUSED if isinstance(error, KeyExpired) else NOT_RUN


def _report(args: argparse.Namespace, result: dict[str, Any], replayed: bool, ran: bool) -> int:
    """Print what was not printed while the command ran. Returns its exit code."""
    code: int = result["code"]
    if args.json:
        streams = {
            name: b"".join(chunk for fd, chunk in result["output"] if fd == number).decode("utf-8", "replace")
            for name, number in (("stdout", 1), ("stderr", 2))
        }
        print(as_json({"exit_code": code, "replayed": replayed, **streams, "dropped": result["dropped"]}))
    elif not ran:
        for fd, chunk in result["output"]:
            _write(sys.stdout.buffer if fd == 1 else sys.stderr.buffer, chunk)
        if result["dropped"]:
            say(f"semel: {result['dropped']:,} more bytes of output were not remembered", sys.stderr)
    elif replayed:
        say("semel: another process took over while the command ran here; its exit code counts", sys.stderr)
    return code


def _write(file: BinaryIO, chunk: bytes) -> None:
    file.write(chunk)
    file.flush()


class _Runner:
    """Runs the command, passes its output on while it runs, and keeps the first part of it."""

    def __init__(self, command: list[str], max_output: int, *, quiet: bool) -> None:
        self._command = command
        self._quiet = quiet
        self._left = max_output
        self._dropped = 0
        self._output: list[tuple[int, bytearray]] = []
        self._lock = threading.Lock()
        self._signals = ExitStack()
        """Restores the handlers of signals."""
        self.ran = self.started = False

    def run(self, environment: dict[str, str]) -> dict[str, Any]:
        self.ran = True
        at_a_terminal = sys.stdin is not None and sys.stdin.isatty()
        forward_to = self._forward_signals(at_a_terminal)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # a fork with threads: _dies_with() takes no lock
                process = subprocess.Popen(
                    self._command,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    env={**os.environ, **environment},
                    # A group of its own gets our signals as a whole. At a terminal it could not read from it.
                    process_group=None if at_a_terminal else 0,
                    preexec_fn=_dies_with(os.getpid()),  # noqa: PLW1509
                )
        except OSError as error:
            self._take(2, f"semel: cannot run {self._command[0]}: {error.strerror}\n".encode(), sys.stderr.buffer)
            return self._result(NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE)
        self.started = True
        assert process.stdout is not None
        assert process.stderr is not None
        readers = [
            threading.Thread(target=self._copy, args=(1, process.stdout, sys.stdout.buffer), daemon=True),
            threading.Thread(target=self._copy, args=(2, process.stderr, sys.stderr.buffer), daemon=True),
        ]
        forward_to(process)
        for reader in readers:
            reader.start()
        code = process.wait()
        for reader in readers:
            reader.join(_LINGER)
        return self._result(code if code >= 0 else 128 - code)

    def _forward_signals(self, at_a_terminal: bool) -> Callable[[subprocess.Popen[bytes]], None]:
        """Pass signals on to the command, which decides what to do. Later ones are ignored until the outcome is stored:
        otherwise the command would run again although it has ended.

        Handlers are set before the command starts, so that no signal ends us beside it. Call what is returned with the
        command: it passes on the signals that came before.
        """
        started: list[subprocess.Popen[bytes]] = []
        early: list[int] = []

        def send(process: subprocess.Popen[bytes], number: int) -> None:
            with suppress(ProcessLookupError):
                os.kill(process.pid, number) if at_a_terminal else os.killpg(process.pid, number)

        def forward(number: int, frame: FrameType | None) -> None:
            if not started:
                early.append(number)
            elif started[0].returncode is None and not (at_a_terminal and number in _BY_THE_TERMINAL):
                send(started[0], number)

        def begin(process: subprocess.Popen[bytes]) -> None:
            started.append(process)
            for number in early:
                send(process, number)

        for number in _FORWARDED:
            self._signals.callback(signal.signal, number, signal.signal(number, forward))
        return begin

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *ended: object) -> None:
        self._signals.close()

    def _copy(self, fd: int, source: Any, target: BinaryIO) -> None:
        with source:
            while chunk := source.read1(_CHUNK):
                self._take(fd, chunk, target)

    def _take(self, fd: int, chunk: bytes, target: BinaryIO) -> None:
        if not self._quiet:
            try:
                _write(target, chunk)
            except BrokenPipeError:  # whoever reads our output is gone: the command goes on
                os.dup2(os.open(os.devnull, os.O_WRONLY), target.fileno())
        with self._lock:
            part = chunk[: self._left]
            self._left -= len(part)
            self._dropped += len(chunk) - len(part)
            if part:
                if not self._output or self._output[-1][0] != fd:
                    self._output.append((fd, bytearray()))
                self._output[-1][1].extend(part)

    def _result(self, code: int) -> dict[str, Any]:
        with self._lock:
            return {"code": code, "output": [(fd, bytes(part)) for fd, part in self._output], "dropped": self._dropped}


def _dies_with(parent: int) -> Callable[[], None] | None:
    """Return what the command's process does before it starts, so that the kernel kills it when this one dies.

    Only Linux can do that. It must not take a lock: threads of ours may hold any.
    """
    if not sys.platform.startswith("linux"):
        return None
    import ctypes

    prctl = ctypes.PyDLL(None).prctl

    def before_it_starts() -> None:
        prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() != parent:  # we have died already
            os._exit(NOT_RUN)

    return before_it_starts


ONCE = Command("once", "Run a command once for its key, and replay its output and exit code.", configure, run)
