"""``semel audit``: its inputs, its three forms of output, and its exit code."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from semel.cli import main

BAD = {
    "openapi": "3.1.0",
    "info": {"title": "Shop", "version": "1"},
    "paths": {"/payments": {"get": {}, "post": {"responses": {"201": {"description": "paid"}}}}},
}
YAML = """
openapi: 3.0.3
info: {title: Shop, version: "1"}
paths:
  /search:
    post: {responses: {200: {description: found}}}
"""


@pytest.fixture
def bad(tmp_path: Path) -> Path:
    path = tmp_path / "openapi.json"
    path.write_text(json.dumps(BAD, indent=2))
    return path


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


@pytest.fixture
def site(tmp_path: Path) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(tmp_path))) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_an_error_is_printed_and_decides_the_exit_code(bad: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", str(bad)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("error    POST   /payments  ")
    assert lines[-1] == "Shop: 1 writes (1 action); 1 error, 0 warnings"


def test_yaml_without_errors_exits_with_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "openapi.yaml"
    path.write_text(YAML)
    assert main(["audit", str(path)]) == 0
    assert capsys.readouterr().out == "Shop: 1 writes (1 query); 0 errors, 0 warnings\n"


def test_a_document_is_read_from_a_url(bad: Path, site: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", f"{site}/{bad.name}", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert [set(each) for each in found["findings"]] == [{"rule", "path", "method", "severity", "message"}]
    assert found["operations"] == [{"method": "POST", "path": "/payments", "class": "action"}]


def test_sarif_names_the_rule_and_the_line(bad: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", str(bad), "--sarif"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["version"] == "2.1.0"
    (run,) = report["runs"]
    (result,) = run["results"]
    assert result["ruleId"] in {rule["id"] for rule in run["tool"]["driver"]["rules"]}
    line = result["locations"][0]["physicalLocation"]["region"]["startLine"]
    assert bad.read_text().splitlines()[line - 1].strip().startswith('"post"')


def test_the_lines_of_a_large_document_are_found_in_one_go(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = {f"/r{i}:run": {"post": {}} for i in range(5000)}
    (tmp_path / "big.json").write_text(json.dumps({"openapi": "3.0.0", "paths": paths}, indent=1))
    assert main(["audit", str(tmp_path / "big.json"), "--sarif"]) == 1
    found = json.loads(capsys.readouterr().out)["runs"][0]["results"]
    lines = [each["locations"][0]["physicalLocation"]["region"]["startLine"] for each in found]
    assert lines == [5 + 3 * i for i in range(5000)]


def test_a_page_that_never_ends_is_given_up(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each byte comes in time, and all of them never do."""
    monkeypatch.setattr("semel.cli.audit._TIMEOUT", 2.0)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def drip() -> None:
            with suppress(OSError), server.accept()[0] as connection:
                connection.sendall(b"HTTP/1.0 200 OK\r\n\r\n")
                while True:
                    connection.sendall(b" ")
                    time.sleep(0.05)

        thread = threading.Thread(target=drip)
        thread.start()
        assert main(["audit", f"http://127.0.0.1:{server.getsockname()[1]}/openapi.json"]) == 2
        thread.join()
    assert "cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["{", "[1, 2]", "a: [", "\x00", ""])
def test_what_is_no_document_is_a_usage_error(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "openapi"
    path.write_text(text)
    assert main(["audit", str(path)]) == 2
    assert capsys.readouterr().err.startswith("semel: ")


def test_a_file_or_a_page_that_is_not_there_is_a_usage_error(
    tmp_path: Path, site: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["audit", str(tmp_path / "none.json")]) == 2
    assert main(["audit", f"{site}/none.json"]) == 2
    assert "404" in capsys.readouterr().err
