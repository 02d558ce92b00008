"""A process that runs a relay. Its broker is a folder, so that a test sees what was sent, also by the dead.

    python -m tests.messaging.relay_worker sync|async URL FOLDER [SETTING=VALUE …]

The broker appends a line for each message to the file ``taken``: process, id, stream, sequence. Files in the folder
tell it what to do: ``down`` makes it unreachable; with ``hold`` it writes what it sends, creates ``inside`` and waits
until ``hold`` is gone. A message of the type ``kill`` kills the process.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from semel import open_async_store, open_store
from semel.core.messaging.messages import BrokerDown, Message, Result, Sent, TryAgain
from semel.messaging.ports import Capabilities
from semel.messaging.relay import AsyncRelay, Relay
from semel.observe.events import Event, Published


class FolderBroker:
    capabilities = Capabilities("Folder", ordered=True, pipelines=True, largest=1 << 20)

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    async def publish(self, messages: Sequence[Message], deadline: float) -> Sequence[Result]:
        if (self._folder / "down").exists():
            return [BrokerDown("the file is there")] * len(messages)
        if any(message.type == "kill" for message in messages):
            os.kill(os.getpid(), signal.SIGKILL)
        if time.monotonic() >= deadline:
            return [TryAgain("too late")] * len(messages)
        with (self._folder / "taken").open("a") as taken:  # one write, so that lines of several processes do not mix
            taken.write("".join(f"{os.getpid()} {one.id} {one.stream} {one.sequence}\n" for one in messages))
        if (self._folder / "hold").exists():
            (self._folder / "inside").touch()
            while (self._folder / "hold").exists():  # noqa: ASYNC110  another process removes it
                await asyncio.sleep(0.01)
        return [Sent()] * len(messages)

    async def close(self) -> None:
        pass


def tell(event: Event) -> None:
    if not isinstance(event, Published):
        print(event.name, flush=True)


def run(url: str, folder: Path, settings: dict[str, Any]) -> None:
    store = open_store(url)
    relay = Relay(store, FolderBroker(folder), on_event=tell, **settings)
    signal.signal(signal.SIGTERM, lambda number, frame: relay.stop())
    print("ready", flush=True)
    relay.run()
    store.close()


async def run_async(url: str, folder: Path, settings: dict[str, Any]) -> None:
    store = open_async_store(url)
    relay = AsyncRelay(store, FolderBroker(folder), on_event=tell, **settings)
    stopping = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)
    print("ready", flush=True)
    async with relay:
        await stopping.wait()
    await store.close()


if __name__ == "__main__":
    kind, url, folder = sys.argv[1:4]
    settings: dict[str, Any] = dict(each.split("=") for each in sys.argv[4:])
    settings = {name: int(text) if text.isdigit() else text for name, text in settings.items()}
    if kind == "sync":
        run(url, Path(folder), settings)
    else:
        asyncio.run(run_async(url, Path(folder), settings))
