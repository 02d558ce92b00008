"""RabbitMQ: one node with a name, ports and folders of its own, and its own epmd, which knows no other node."""

from __future__ import annotations

import asyncio
import itertools
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from tests.servers.base import LOOPBACK, Server, free_port


class _Epmd(Server):
    """Erlang's port mapper. Without one of our own, the first node would start one that outlives it."""

    name = "epmd"
    binaries = ("epmd",)
    packages = ("erlang-base",)

    def command(self) -> Sequence[str | Path]:
        return [self.binary("epmd"), "-address", LOOPBACK, "-port", str(self.port)]

    def ready(self) -> bool:
        return _accepts(self.port)


class RabbitMQServer(Server):
    name = "rabbitmq"
    binaries = ("rabbitmq-server", "rabbitmqctl")
    # Debian's own in /usr/sbin changes the user first.
    search: ClassVar[tuple[str, ...]] = ("/usr/lib/rabbitmq/bin", "/opt/homebrew/opt/rabbitmq/sbin")
    packages = ("rabbitmq-server",)
    costly = True
    stop_timeout = 30.0
    port_taken: ClassVar[str] = "eaddrinuse|dist_port_already_used"

    def __init__(self) -> None:
        super().__init__()
        self._epmd = _Epmd()
        self._numbers = itertools.count(1)
        self._log_before = 0

    @property
    def url(self) -> str:
        return f"amqp://guest:guest@{LOOPBACK}:{self.port}/"

    def start(self) -> None:
        self.binary(self.binaries[0])
        if self._epmd.pid is None:
            self._epmd.start()
        try:
            super().start()
        except BaseException:
            self._epmd.stop()
            raise

    def stop(self) -> None:
        super().stop()
        self._epmd.stop()

    def prepare(self) -> None:
        (self.folder / "plugins").write_text("[].\n")
        settings = {"loopback_users": "none", "vm_memory_high_watermark.absolute": "1GB", "disk_free_limit.absolute": 1}
        (self.folder / "rabbitmq.conf").write_text("".join(f"{name} = {value}\n" for name, value in settings.items()))

    def command(self) -> Sequence[str | Path]:
        self._log_before = self.log.stat().st_size if self.log.exists() else 0
        return [self.binary(self.binaries[0]), "-noinput"]

    def environment(self) -> Mapping[str, str]:
        return {
            **super().environment(),
            "RABBITMQ_ALLOW_INPUT": "1",  # then the script becomes the server, instead of waiting for it
            "RABBITMQ_CONF_ENV_FILE": "/dev/null",
            "RABBITMQ_CONFIG_FILE": str(self.folder / "rabbitmq.conf"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(self.folder / "plugins"),
            "RABBITMQ_MNESIA_BASE": str(self.folder / "data"),
            "RABBITMQ_LOG_BASE": str(self.folder),
            "RABBITMQ_LOGS": "-",
            "RABBITMQ_NODENAME": "semel@localhost",
            "RABBITMQ_NODE_IP_ADDRESS": LOOPBACK,
            "RABBITMQ_NODE_PORT": str(self.port),
            "RABBITMQ_DIST_PORT": str(free_port()),
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-kernel inet_dist_use_interface {127,0,0,1} +S 1:1",
            "ERL_EPMD_PORT": str(self._epmd.port),
            "ERL_EPMD_ADDRESS": LOOPBACK,
        }

    def ready(self) -> bool:
        with self.log.open("rb") as log:
            log.seek(self._log_before)
            return b"Server startup complete" in log.read() and _accepts(self.port)

    def ctl(self, *words: str) -> None:
        """Run a command of rabbitmqctl on this node."""
        command = [str(self.binary("rabbitmqctl")), *words]
        environment = {**self.environment(), "RABBITMQ_CTL_DIST_PORT_MIN": "0", "RABBITMQ_CTL_DIST_PORT_MAX": "0"}
        subprocess.run(command, env=environment, check=True, timeout=60, stdout=subprocess.DEVNULL)

    def queue(self, type: str = "quorum", **arguments: object) -> str:
        """The URL of a new queue; ``arguments`` as of RabbitMQ, with ``_`` for each ``-``: ``x_delivery_limit=3``.

        A quorum queue has a single active consumer, unless ``x_single_active_consumer=False``.
        """
        name = f"test-{next(self._numbers)}"
        named = {key.replace("_", "-"): value for key, value in arguments.items()}
        if type == "quorum":
            named.setdefault("x-single-active-consumer", True)
        asyncio.run(_declare(self.url, name, {"x-queue-type": type, **named}))
        return f"{self.url}?queue={name}"


async def _declare(url: str, name: str, arguments: dict[str, Any]) -> None:
    import aio_pika

    async with await aio_pika.connect(url, timeout=30) as connection:
        channel = await connection.channel()
        await channel.declare_queue(name, durable=True, arguments=arguments)


def _accepts(port: int) -> bool:
    try:
        socket.create_connection((LOOPBACK, port), timeout=1).close()
    except OSError:
        return False
    return True
