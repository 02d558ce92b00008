"""`python -m bench.client_storm`: clients that are killed, behind a network that loses what it can.

::

    client process ──▶ proxy ──▶ a service protected by Semel
    killed and started again    drops, delays, truncates and duplicates requests and answers

A client process sends requests, each with an intent of its own, and remembers nothing but its journal. It is killed
(SIGKILL) and started again, and resumes its journal at each start. At the end the network is calm, and the journal is
resumed once more. The verdict is from outside: the proxy knows every intent that left a client, the service knows how
often each was executed. An intent that was executed twice is a duplicate. One that left a client, was not executed, and
is not reported as unknown with its key, is lost.

With `--outages` nobody starts the client again for hours now and then, up to more than the day for which the service
remembers a key. All clocks are set forward for that. What is too old by then must not be sent again: the client reports
it as expired.

`--journal no`, `--new-keys` and `--outages --window 30d` show what the journal, the stable key and the right window are
good for: each of them fails. The seed decides about faults and kills; threads and sockets add their own chance.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CLIENTS = ("httpx", "httpx-async", "requests", "aiohttp", "urllib3")
FAULTS = {
    "pass": 50,
    "drop the request": 8,
    "cut the request": 6,
    "drop the answer": 8,
    "truncate the answer": 8,
    "delay the request": 6,
    "delay the answer": 4,
    "duplicate the request": 6,
    "duplicate the request late": 4,
}
"""What happens to a request, with its weight."""
TIMEOUT = 0.25
"""Seconds that a client waits for an answer. Delays are longer."""
DELAY = (0.3, 0.6)
CALLERS = 8
HOUR = 3600
OUTAGES = (0, 0, 1, 14, 23.8, 24.2)
"""Hours until a client is started again."""


@dataclass
class Verdict:
    """What came of a storm."""

    client: str
    operations: int = 0
    kills: int = 0
    faults: dict[str, int] = field(default_factory=dict)
    executed: int = 0
    duplicates: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    """Keys that the clients still report as unknown, or have reported as expired."""
    expired: int = 0
    """How many of them are expired."""
    wrong: list[str] = field(default_factory=list)
    """Intents whose client was told something that is not true."""
    seconds: float = 0.0

    @property
    def clean(self) -> bool:
        return not (self.duplicates or self.lost or self.wrong)


# The service


class Service:
    """Executes intents in a thread with its own event loop, behind Semel."""

    def __init__(self) -> None:
        self.executed: Counter[str] = Counter()
        self.ahead = 0.0
        """Seconds by which all clocks were set forward."""

    def app(self) -> Any:
        from starlette.applications import Starlette
        from starlette.requests import Request
        from starlette.responses import JSONResponse
        from starlette.routing import Route

        from semel import AsyncMemoryStore, AsyncSemel, Policy
        from semel.http.fastapi import idempotent, install

        @idempotent()
        async def execute(request: Request) -> JSONResponse:
            intent = (await request.json())["intent"]
            await asyncio.sleep(0)
            self.executed[intent] += 1
            return JSONResponse({"executed": intent}, 201)

        app = Starlette(routes=[Route("/intents", execute, methods=["POST"])])
        store = AsyncMemoryStore(clock=lambda: time.monotonic() + self.ahead)
        guard = AsyncSemel(store, sweep_every=None, policy=Policy(ttl="24h"))
        install(app, guard=guard, tenant=lambda request: "storm")
        return app


# The network


class Proxy:
    """Forwards requests to the service, with faults."""

    def __init__(self, port: int, seed: int) -> None:
        self._service = port
        self._random = random.Random(seed)
        self.calm = False
        self.faults: Counter[str] = Counter()
        self.keys: dict[str, set[str]] = {}
        """By intent: the keys that it was sent with."""
        self.requests = 0
        self._under_way = 0
        self._tasks: set[asyncio.Task[Any]] = set()
        self._serving: set[asyncio.Task[Any]] = set()  # asyncio itself holds them by a weak reference only

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        try:
            while (request := await _read_message(reader)) and await self._handle(request, writer):
                pass
        except (OSError, asyncio.IncompleteReadError):
            pass  # the client was killed
        except asyncio.CancelledError:
            pass  # the storm is over
        finally:
            self._serving.discard(task)
            writer.close()

    async def _handle(self, request: bytes, writer: asyncio.StreamWriter) -> bool:
        head, _, body = request.partition(b"\r\n\r\n")
        key = next(
            (
                line.split(b":", 1)[1].strip().decode()
                for line in head.split(b"\r\n")
                if line.lower()[:15] == b"idempotency-key"
            ),
            "",
        )
        self.keys.setdefault(json.loads(body)["intent"], set()).add(key)
        self.requests += 1
        fault = "pass" if self.calm else self._random.choices(list(FAULTS), list(FAULTS.values()))[0]
        self.faults[fault] += 1
        delay = self._random.uniform(*DELAY)
        if fault == "drop the request":
            return False
        if fault == "cut the request":
            await self._forward(request[: -len(body) // 2], answered=False)
            return False
        if fault == "delay the request":  # it arrives, whether or not the client still waits
            self._later(delay, request)
            return False
        if fault == "duplicate the request late":
            self._later(delay, request)
        if fault == "duplicate the request":
            self._later(0, request)
        answer = await self._forward(request)
        if fault == "delay the answer":
            await asyncio.sleep(delay)
        if fault == "drop the answer" or not answer:
            return False
        if fault == "truncate the answer":
            answer = answer[: self._random.randrange(1, len(answer))]
        writer.write(answer)
        await writer.drain()
        return fault != "truncate the answer"

    def _later(self, delay: float, request: bytes) -> None:
        async def send() -> None:
            await asyncio.sleep(delay)
            await self._forward(request)

        task = asyncio.create_task(send())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _forward(self, request: bytes, answered: bool = True) -> bytes:
        self._under_way += 1
        try:
            return await self._pass_on(request, answered)
        finally:
            self._under_way -= 1

    async def _pass_on(self, request: bytes, answered: bool) -> bytes:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self._service)
        except OSError:
            return b""
        try:
            writer.write(request)
            await writer.drain()
            return await _read_message(reader) if answered else b""
        except (OSError, asyncio.IncompleteReadError):
            return b""
        finally:
            writer.close()

    async def settle(self) -> None:
        """Wait until all that is under way has arrived. No client may be alive."""
        while self._tasks or self._under_way or self._serving:
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await asyncio.sleep(0.001)


async def _read_message(reader: asyncio.StreamReader) -> bytes:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return b""
    length = next(
        (int(line.split(b":", 1)[1]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), 0
    )
    return head + await reader.readexactly(length)


@dataclass
class Network:
    """The service and the proxy, in a thread of this process."""

    service: Service
    proxy: Proxy
    url: str
    loop: asyncio.AbstractEventLoop

    def settle(self) -> None:
        asyncio.run_coroutine_threadsafe(self.proxy.settle(), self.loop).result()


@contextmanager
def network(seed: int) -> Iterator[Network]:
    import uvicorn

    service = Service()
    ready: list[Any] = []
    stopping = threading.Event()

    async def main() -> None:
        config = uvicorn.Config(service.app(), port=0, log_level="critical", lifespan="on", ws="none")
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve())
        while not server.started:  # noqa: ASYNC110 it has no event
            await asyncio.sleep(0.01)
        proxy = Proxy(server.servers[0].sockets[0].getsockname()[1], seed)
        listening = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/intents"
        ready.append(Network(service, proxy, url, asyncio.get_running_loop()))
        while not stopping.is_set():  # noqa: ASYNC110 it is set by another thread
            await asyncio.sleep(0.02)
        listening.close()
        for task in proxy._serving:
            task.cancel()
        server.should_exit = server.force_exit = True
        await serving

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    while not ready and thread.is_alive():
        time.sleep(0.01)
    try:
        yield ready[0]
    finally:
        stopping.set()
        thread.join()


# The client process


def work(options: argparse.Namespace) -> None:
    """Resume the journal. Then, unless told to stop there, send one intent after another until killed."""
    from semel.client import Retry

    logging.getLogger("semel.client").setLevel(logging.ERROR)  # what is in doubt is told below
    clock = time.time
    time.time = lambda: clock() + options.ahead
    settings = {
        "retry": Retry(attempts=12, time="20s", base="4ms", cap="60ms", quota=None, window=options.window),
        "journal": options.path if options.journal else None,
    }
    results = os.open(options.results, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def tell(intent: str, outcome: str, key: str) -> None:
        os.write(results, f"{intent} {outcome} {key}\n".encode())

    run = _run_async if options.client in ("httpx-async", "aiohttp") else _run_threads
    run(options, settings, tell)


Tell = Callable[[str, str, str], None]


def _tell_expired(tell: Tell) -> Callable[[Any], None]:
    """Write down what a resume reports as expired: it leaves the journal with that."""
    known = 0

    def progress(report: Any) -> None:
        nonlocal known
        for entry in report.expired[known:]:
            tell(json.loads(entry.body)["intent"], "expired", entry.key)
        known = len(report.expired)

    return progress


def _finish(report: Any, options: argparse.Namespace) -> None:
    if options.drain:
        print(json.dumps(report.as_dict()), flush=True)


def _run_threads(options: argparse.Namespace, settings: dict[str, Any], tell: Tell) -> None:
    from semel import NoAnswer

    post: Callable[[bytes], Any]
    resume: Callable[[], Any]
    if options.client == "httpx":
        import httpx

        from semel.client.httpx import IdempotencyTransport

        inner: Any = httpx.HTTPTransport()
        if options.new_keys:
            inner = _new_keys(inner)
        transport = IdempotencyTransport(inner, **settings)
        client = httpx.Client(transport=transport, timeout=TIMEOUT)

        def post(body: bytes) -> Any:
            return client.post(options.url, content=body).extensions["idempotency"]

        def resume() -> Any:
            return transport.resume(client, progress=_tell_expired(tell))
    elif options.client == "requests":
        import requests

        from semel.client.requests import IdempotencyAdapter

        adapter = IdempotencyAdapter(**settings)
        session = requests.Session()
        session.trust_env = False
        session.mount("http://", adapter)
        session.request = _with_timeout(session.request)  # type: ignore[method-assign]

        def post(body: bytes) -> Any:
            found: Any = session.post(options.url, data=body)
            return found.idempotency

        def resume() -> Any:
            return adapter.resume(session, progress=_tell_expired(tell))
    else:
        from semel.client.urllib3 import IdempotencyPoolManager

        http = IdempotencyPoolManager(timeout=TIMEOUT, maxsize=CALLERS, **settings)

        def post(body: bytes) -> Any:
            found: Any = http.request("POST", options.url, body=body)
            return found.idempotency

        def resume() -> Any:
            return http.resume(progress=_tell_expired(tell))

    def loop() -> None:
        while True:
            intent = str(uuid.uuid4())
            try:
                receipt = post(json.dumps({"intent": intent}).encode())
                tell(intent, receipt.outcome, receipt.key)
            except NoAnswer as error:
                tell(intent, error.outcome, error.key)

    if options.journal:
        _finish(resume(), options)
    if not options.drain:
        threads = [threading.Thread(target=loop, daemon=True) for _ in range(CALLERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def _with_timeout(request: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: request(*args, **{"timeout": TIMEOUT, **kwargs})


def _new_keys(inner: Any) -> Any:
    """What a careless client does: another key for each attempt."""
    import httpx

    class Careless(httpx.BaseTransport):
        def handle_request(self, request: httpx.Request) -> httpx.Response:
            request.headers["Idempotency-Key"] = str(uuid.uuid4())
            found: httpx.Response = inner.handle_request(request)
            return found

    return Careless()


def _run_async(options: argparse.Namespace, settings: dict[str, Any], tell: Tell) -> None:
    from semel import NoAnswer

    async def main() -> None:
        post: Callable[[bytes], Awaitable[Any]]
        resume: Callable[[], Awaitable[Any]]
        if options.client == "httpx-async":
            import httpx

            from semel.client.httpx import AsyncIdempotencyTransport

            transport = AsyncIdempotencyTransport(**settings)
            client = httpx.AsyncClient(transport=transport, timeout=TIMEOUT)

            async def post(body: bytes) -> Any:
                return (await client.post(options.url, content=body)).extensions["idempotency"]

            async def resume() -> Any:
                return await transport.resume(client, progress=_tell_expired(tell))
        else:
            import aiohttp

            from semel.client.aiohttp import IdempotencyClientMiddleware

            middleware = IdempotencyClientMiddleware(**settings)
            limits = aiohttp.ClientTimeout(sock_read=TIMEOUT, sock_connect=TIMEOUT)
            session = aiohttp.ClientSession(middlewares=[middleware], timeout=limits)

            async def post(body: bytes) -> Any:
                async with session.post(options.url, data=body) as response:
                    return vars(response)["idempotency"]

            async def resume() -> Any:
                return await middleware.resume(session, progress=_tell_expired(tell))

        async def loop() -> None:
            while True:
                intent = str(uuid.uuid4())
                try:
                    receipt = await post(json.dumps({"intent": intent}).encode())
                    tell(intent, receipt.outcome, receipt.key)
                except NoAnswer as error:
                    tell(intent, error.outcome, error.key)

        if options.journal:
            _finish(await resume(), options)
        if options.drain:
            await (session.close() if options.client == "aiohttp" else client.aclose())
        else:
            await asyncio.gather(*(loop() for _ in range(CALLERS)))

    asyncio.run(main())


# The storm


def storm(
    client: str, operations: int, *, seed: int = 1, journal: bool = True, new_keys: bool = False,
    outages: bool = False, window: str = "24h", longest_life: int = 80,
    progress: Callable[[str], None] = lambda text: None,
) -> Verdict:  # fmt: skip
    """Let clients live and die until so many intents have left them, then judge.

    :param outages: set the clocks forward by some hours before some of the lives.
    :param window: for how long the clients believe that the service remembers a key.
    :param longest_life: after so many requests, at most, a client process is killed.
    """
    began = time.monotonic()
    verdict = Verdict(client)
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder, network(seed) as net:
        results = Path(folder) / "results.txt"
        command = [
            sys.executable, "-m", "bench.client_storm", "--work", "--client", client, "--url", net.url,
            "--path", f"{folder}/calls.db", "--results", str(results), "--journal", "yes" if journal else "no",
            "--window", window, *(["--new-keys"] if new_keys else []),
        ]  # fmt: skip
        while len(net.proxy.keys) < operations:
            end = net.proxy.requests + chance.randint(5, longest_life)
            if outages and (hours := chance.choice(OUTAGES)):
                net.settle()  # no request is under way for hours
                net.service.ahead += hours * HOUR
            with subprocess.Popen([*command, "--ahead", str(net.service.ahead)]) as process:
                while net.proxy.requests < end and process.poll() is None:
                    time.sleep(0.001)
                if process.poll() is not None:
                    raise RuntimeError(f"the client process ended by itself: {process.returncode}")
                process.send_signal(signal.SIGKILL)
            verdict.kills += 1
            progress(f"{len(net.proxy.keys)} of {operations} operations, {verdict.kills} kills")
        net.proxy.calm = True
        net.settle()
        report: dict[str, Any] = {"unknown": []}
        if journal:
            last = [*command, "--ahead", str(net.service.ahead), "--drain"]
            drained = subprocess.run(last, stdout=subprocess.PIPE, check=True, text=True)
            report = json.loads(drained.stdout)
        net.settle()
        told = [line.split() for line in results.read_text().splitlines()] if results.exists() else []
        _judge(verdict, net, told, {entry["key"] for entry in report["unknown"]}, journal)
    verdict.seconds = time.monotonic() - began
    return verdict


def _judge(verdict: Verdict, net: Network, told: list[list[str]], reported: set[str], journal: bool) -> None:
    executed, keys = net.service.executed, net.proxy.keys
    verdict.operations = len(keys)
    verdict.executed = sum(executed.values())
    verdict.faults = dict(sorted(net.proxy.faults.items()))
    verdict.duplicates = [intent for intent, times in executed.items() if times > 1]
    if not journal:  # then only the answer of a call reports it
        reported = {key for _, outcome, key in told if outcome == "unknown"}
    expired = {key for _, outcome, key in told if outcome == "expired"}
    verdict.expired = len(expired)
    reported = reported | expired
    verdict.unknown = sorted(reported)
    verdict.lost = [intent for intent, used in keys.items() if not executed[intent] and not used & reported]
    verdict.wrong = [intent for intent, outcome, _ in told if (outcome == "succeeded") > bool(executed[intent])]
    verdict.wrong += [intent for intent, outcome, _ in told if outcome == "rejected"]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.client_storm", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--client", choices=(*CLIENTS, "all"), default="all")
    parser.add_argument("--operations", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--journal", type=lambda text: text != "no", default=True, metavar="yes|no")
    parser.add_argument("--new-keys", action="store_true", help="another key for each attempt (httpx only)")
    parser.add_argument("--outages", action="store_true", help="let hours pass before some of the lives of a client")
    parser.add_argument("--window", default="24h", help="how long the clients believe that a key is remembered")
    parser.add_argument("--ahead", type=float, default=0.0, help=argparse.SUPPRESS)
    for name in ("--work", "--drain"):
        parser.add_argument(name, action="store_true", help=argparse.SUPPRESS)
    for name in ("--url", "--path", "--results"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.work:
        work(options)
        return 0

    def progress(text: str) -> None:
        if sys.stderr.isatty():
            print(f"\r{text} ", end="", file=sys.stderr, flush=True)

    clean = True
    for client in CLIENTS if options.client == "all" else (options.client,):
        verdict = storm(
            client, options.operations, seed=options.seed, journal=options.journal, new_keys=options.new_keys,
            outages=options.outages, window=options.window, progress=progress,
        )  # fmt: skip
        clean = clean and verdict.clean
        print(
            f"{client}: {verdict.operations} operations, {verdict.kills} kills, {sum(verdict.faults.values())} requests"
            f"; executed {verdict.executed}, duplicates {len(verdict.duplicates)}, lost {len(verdict.lost)}, unknown "
            f"{len(verdict.unknown)} (expired {verdict.expired}), wrong {len(verdict.wrong)}; {verdict.seconds:.0f} s",
            flush=True,
        )
    return 0 if clean else 1


if __name__ == "__main__":
    with suppress(BrokenPipeError):
        sys.exit(main())
