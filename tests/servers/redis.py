"""Redis: one server, a master with replicas under sentinels, and a cluster of three masters with a replica each.

The plain server keeps nothing on disk. In the groups the replicas are real and the failovers are Redis' own.
SEMEL_TEST_REDIS_SERVER names another program to run in its place: a newer Redis, or valkey-server.
"""

from __future__ import annotations

import itertools
import os
import signal
import socket
import subprocess
import time
from abc import abstractmethod
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

from tests.servers.base import LOOPBACK, Server, ServerError, free_port

ASKED_OFTEN = ("INFO", "CLUSTER", "SENTINEL", "CLIENT", "KEYS", "DBSIZE")
_SERVER = Path(os.environ.get("SEMEL_TEST_REDIS_SERVER") or "redis-server")
_CLI = _SERVER.with_name(_SERVER.name.replace("server", "cli"))  # beside valkey-server it is valkey-cli


class RedisServer(Server):
    name = "redis"
    binaries = (str(_SERVER), str(_CLI))
    packages = ("redis-server",)
    options: ClassVar[tuple[str, ...]] = (
        *("--save", "", "--appendonly", "no", "--repl-diskless-sync-delay", "0"),
        *("--shutdown-on-sigterm", "nosave now force"),  # also while a child writes its first file
    )

    def __init__(self, *more: str) -> None:
        super().__init__()
        self._more = more
        self._numbers = itertools.count(1)

    @property
    def url(self) -> str:
        return f"redis://{LOOPBACK}:{self.port}/0"

    def command(self) -> Sequence[str | Path]:
        return [
            self.binary(self.binaries[0]),
            *("--port", str(self.port), "--bind", LOOPBACK, "--dir", self.folder, "--daemonize", "no"),
            *self.options,
            *self._more,
        ]

    def ready(self) -> bool:
        try:
            found = self.cli("INFO", "server")
        except ServerError:
            return False
        return f"process_id:{self.pid}\n" in found

    def database(self) -> str:
        """The URL of an empty database of this server; there are fifteen, used in turn."""
        number = (next(self._numbers) - 1) % 15 + 1
        # Not by redis-cli: to start a process takes ten times as long.
        with socket.create_connection((LOOPBACK, self.port), timeout=30) as connection:
            connection.sendall(f"SELECT {number}\r\nFLUSHDB\r\n".encode())
            answers = connection.makefile("rb")
            said = [answers.readline(), answers.readline()]
            answers.close()
        if said != [b"+OK\r\n"] * 2:
            raise ServerError(f"redis: FLUSHDB of {number}: {said}")
        return f"redis://{LOOPBACK}:{self.port}/{number}"

    def restart(self) -> None:
        self.restart_with(signal.SIGTERM)

    def cli(self, *words: str) -> str:
        """What redis-cli prints. What tests ask again and again is asked without starting it."""
        if words[0] in ASKED_OFTEN and (said := self._ask(words)) is not None:
            return said
        command = [str(self.binary(self.binaries[1])), "-h", LOOPBACK, "-p", str(self.port), *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        if done.returncode != 0:
            raise ServerError(f"redis-cli {' '.join(words[:2])}: {done.stdout}{done.stderr}")
        return done.stdout

    def _ask(self, words: Sequence[str]) -> str | None:
        """The answer as redis-cli would print it; None if it is an error, or something else that redis-cli explains."""
        try:
            with socket.create_connection((LOOPBACK, self.port), timeout=30) as connection:
                parts = [f"${len(word.encode())}\r\n{word}\r\n" for word in words]
                connection.sendall(f"*{len(parts)}\r\n{''.join(parts)}".encode())
                with connection.makefile("rb") as answer:
                    return _printed(answer).replace("\r\n", "\n")
        except (OSError, ValueError):
            return None


def _printed(answer: BinaryIO) -> str:
    line = answer.readline().decode()
    kind, rest = line[:1], line[1:].removesuffix("\r\n")
    if kind in ("+", ":"):
        return f"{rest}\n"
    if kind == "$" and int(rest) >= 0:
        text = answer.read(int(rest) + 2)[:-2].decode()
        return text if text.endswith("\n") else f"{text}\n"
    if kind == "*" and int(rest) > 0:
        return "".join(_printed(answer) for _ in range(int(rest)))
    raise ValueError(line)


class _Sentinel(RedisServer):
    """One sentinel; it writes its findings into its own configuration file."""

    def __init__(self, master: RedisServer) -> None:
        super().__init__()
        self._master = master

    def prepare(self) -> None:
        watched = f"sentinel monitor shop {LOOPBACK} {self._master.port} 2"
        lines = [watched, "sentinel down-after-milliseconds shop 500", "sentinel failover-timeout shop 2000"]
        (self.folder / "sentinel.conf").write_text("\n".join([*lines, ""]))

    def command(self) -> Sequence[str | Path]:
        return [
            self.binary(self.binaries[0]), self.folder / "sentinel.conf", "--sentinel",
            *("--port", str(self.port), "--bind", LOOPBACK, "--dir", self.folder),
        ]  # fmt: skip


class _Member(RedisServer):
    """A node of a cluster; its bus is on another port of our choice, which goes with the first one."""

    def __init__(self) -> None:
        super().__init__()
        self._buses: dict[int, int] = {}

    def command(self) -> Sequence[str | Path]:
        if self.port not in self._buses:
            self._buses[self.port] = free_port()
        bus = str(self._buses[self.port])
        return [
            *super().command(),
            *("--cluster-enabled", "yes", "--cluster-port", bus, "--cluster-node-timeout", "1000"),
            *("--cluster-replica-validity-factor", "0"),
        ]


class _Group(Server):
    """Several servers under one name."""

    binaries = RedisServer.binaries
    packages = RedisServer.packages

    def __init__(self) -> None:
        super().__init__()
        self.members: list[RedisServer] = []

    def command(self) -> Sequence[str | Path]:
        raise NotImplementedError

    def ready(self) -> bool:
        raise NotImplementedError

    def start(self) -> None:
        self.members = []  # those of an earlier life are not started again
        try:
            self.form()
        except BaseException:
            self.stop()
            raise

    @abstractmethod
    def form(self) -> None:
        """Start the members, and wait until they work together."""

    def stop(self) -> None:
        members, self.members = self.members, []  # it may be started again, with others
        if members:
            with ThreadPoolExecutor(len(members)) as pool:
                list(pool.map(lambda member: member.stop(), members))

    def log_tail(self, lines: int = 40) -> str:
        return "\n".join(f"--- {member.port}\n{member.log_tail(lines // 4)}" for member in self.members)

    def _start(self, members: Sequence[RedisServer]) -> None:
        self.members += members
        with ThreadPoolExecutor(len(members)) as pool:
            list(pool.map(lambda member: member.start(), members))

    def _until(self, condition: Any, what: str) -> None:
        deadline = time.monotonic() + self.start_timeout
        while not condition():
            if time.monotonic() > deadline:
                raise ServerError(f"{self.name}: {what}\n{self.log_tail()}")
            time.sleep(0.02)


class RedisSentinelServers(_Group):
    """A master, two replicas, three sentinels that watch the service ``shop``."""

    name = "redis_sentinel"

    def form(self) -> None:
        master = RedisServer()
        self._start([master])
        self.port = master.port
        follows = ("--replicaof", f"{LOOPBACK} {master.port}")
        self.data: list[RedisServer] = [master, RedisServer(*follows), RedisServer(*follows)]
        self._start(self.data[1:])
        self._until(lambda: master.cli("INFO", "replication").count("state=online") == 2, "no replicas")
        self.sentinels: list[RedisServer] = [_Sentinel(master) for _ in range(3)]
        self._start(self.sentinels)
        self._until(lambda: all(map(self._knows_all, self.sentinels)), "the sentinels do not know each other")

    def _knows_all(self, sentinel: RedisServer) -> bool:
        found = sentinel.cli("SENTINEL", "MASTER", "shop").split("\n")
        known = dict(zip(found[::2], found[1::2], strict=False))
        return (known.get("num-slaves"), known.get("num-other-sentinels")) == ("2", "2")

    @property
    def url(self) -> str:
        return f"redis+sentinel://{','.join(f'{LOOPBACK}:{one.port}' for one in self.sentinels)}/shop/0"

    @property
    def master(self) -> RedisServer:
        """Whom the sentinels name."""
        port = int(self.sentinels[0].cli("SENTINEL", "GET-MASTER-ADDR-BY-NAME", "shop").split("\n")[1])
        return next(one for one in self.data if one.port == port)


class RedisClusterServers(_Group):
    """Three masters with a replica each."""

    name = "redis_cluster"
    costly = True

    def form(self) -> None:
        self._start([_Member() for _ in range(6)])
        self.port = self.members[0].port
        nodes = [f"{LOOPBACK}:{one.port}" for one in self.members]
        self.members[0].cli("--cluster", "create", *nodes, "--cluster-replicas", "1", "--cluster-yes")
        self._until(lambda: all(map(self._settled, self.members)), "the cluster does not form")

    def _settled(self, member: RedisServer) -> bool:
        if "cluster_state:ok" not in member.cli("CLUSTER", "INFO"):
            return False
        replication = member.cli("INFO", "replication")
        return "state=online" in replication or "master_link_status:up" in replication

    @property
    def url(self) -> str:
        return f"redis+cluster://{','.join(f'{LOOPBACK}:{one.port}' for one in self.members[:3])}"

    def masters(self) -> list[RedisServer]:
        return [one for one in self.members if one.pid is not None and "role:master" in one.cli("INFO", "replication")]

    def flush(self) -> None:
        for master in self.masters():
            master.cli("FLUSHALL")
