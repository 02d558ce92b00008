"""``semel console``: it serves, it is closed where others can reach it, and a signal ends it at once."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from semel import Semel, SQLiteStore
from semel.cli import main
from semel.console.watched import default_name, names_for

TOKEN = "a long enough token"


@pytest.fixture
def url(tmp_path: Path) -> str:
    with Semel(SQLiteStore(tmp_path / "shop.db")) as guard:
        guard.run("pay", key="4111-1111", call=lambda: "paid")
    return f"sqlite:///{tmp_path}/shop.db"


@contextmanager
def serving(*words: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    command = [sys.executable, "-m", "semel", "console", *words, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            found = re.search(r"http://[\d.]+:\d+", line)
            assert found, line + process.communicate()[1]
            yield found[0], process
        finally:
            process.kill()


@pytest.mark.process
@pytest.mark.slow
def test_it_serves_until_a_signal_even_while_somebody_watches(url: str) -> None:
    with (
        serving(url, "--token", TOKEN) as (address, process),
        httpx.Client(base_url=address, trust_env=False) as client,
    ):
        assert client.get("/").status_code == 401
        client.headers["Authorization"] = f"Bearer {TOKEN}"
        view = client.get("/operations.json").json()
        assert [record["state"] for record in view["records"]] == ["done"]
        assert "4111-1111" not in client.get("/operations").text
        with client.stream("GET", "/live?of=/stuck") as stream:
            assert stream.headers["content-type"].startswith("text/event-stream")
            lines = stream.iter_lines()
            assert "Nothing is stuck" in next(line for line in lines if line.startswith("data: "))
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0
    with serving(url) as (address, process), httpx.Client(base_url=address, trust_env=False) as client:
        assert client.get("/").status_code == 200
        assert client.get("/", headers={"Host": "evil.test"}).status_code == 403
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--host", "0.0.0.0"], "protect it with --token"),
        (["--host", "::"], "protect it with --token"),
        (["--host", "192.0.2.1", "--token", "short"], "at least 16 characters"),
    ],
)
def test_what_is_not_safe_is_refused(
    url: str, words: list[str], error: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SEMEL_CONSOLE_TOKEN", raising=False)
    assert main(["console", url, *words]) == 2
    told = capsys.readouterr().err
    assert error in told
    assert told.count("\n") == 1


def test_a_port_that_is_taken_is_named(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["console", url, "--port", str(port)]) == 2
    assert f"port {port} of 127.0.0.1 cannot be used" in capsys.readouterr().err


def test_it_creates_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["console", f"sqlite:///{tmp_path}/nothing.db"]) != 0
    assert list(tmp_path.iterdir()) == []
    assert "nothing.db" in capsys.readouterr().err


def test_the_names_of_stores_have_no_secrets() -> None:
    names = names_for(
        ["postgresql://app:pa55@db/shop?password=pa55", "postgresql://x:y@other/shop", "redis://:pa55@r:1"]
    )
    assert list(names) == ["postgresql-shop", "postgresql-shop-2", "redis-r"]
    assert default_name("tiered:postgresql://u:p@db/shop,redis://:p@r:6379") == "postgresql-shop"
    assert default_name("memory:") == "memory"
