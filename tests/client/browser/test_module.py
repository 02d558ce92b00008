"""semel.js as pure logic: run by Node where there is one. What needs a browser is in test_chromium.py."""

from __future__ import annotations

import re
import shutil
import subprocess
from importlib.resources import files
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.slow
def test_the_logic() -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed: Chromium runs the module as well")
    ran = subprocess.run([node, "--test", HERE / "semel.test.mjs"], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout
    assert int(re.findall(r"^# pass (\d+)$", ran.stdout, re.MULTILINE)[0]) > 30


@pytest.mark.slow
def test_the_page_is_javascript(tmp_path: Path) -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed")
    page = (HERE.parents[2] / "docs" / "how-to" / "browser.md").read_text("utf-8")
    script = tmp_path / "page.mjs"
    script.write_text("\n".join(re.findall(r"^```js\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)))
    subprocess.run([node, "--check", script], check=True)


def test_the_types_name_what_the_module_exports() -> None:
    folder = files("semel") / "client" / "browser"
    names = [
        set(re.findall(r"^export (?:class|function) (\w+)", (folder / name).read_text("utf-8"), re.MULTILINE))
        for name in ("semel.js", "semel.d.ts")
    ]
    assert names[0] == names[1] == {"Semel", "digest", "judge", "retryAfter"}
