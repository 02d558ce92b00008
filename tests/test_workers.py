"""`--workers`: what happens in a worker reaches the session that has forked it."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[1]
Run = Callable[..., list[str]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    def run(*arguments: str, **files: str) -> list[str]:
        for name, text in files.items():
            (tmp_path / f"{name}.py").write_text(dedent(text))
        command = [sys.executable, "-m", "pytest", "-p", "tests.workers", "-p", "no:randomly", "-p", "no:cacheprovider"]
        command += ["-c", "/dev/null", f"--rootdir={tmp_path}", "--workers=2", *arguments, str(tmp_path)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
        return [*done.stdout.splitlines(), f"exit {done.returncode}"]

    return run


def test_the_tests_of_a_file_run_in_one_worker_and_those_of_two_files_in_two(run: Run) -> None:
    text = """
    import os, pathlib, time

    HERE = pathlib.Path(__file__)

    def test_one(tmp_path):
        HERE.with_suffix(".pid").write_text(str(os.getpid()))
        deadline = time.monotonic() + 30
        while len(list(HERE.parent.glob("*.pid"))) < 2:  # the other file runs at the same time
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def test_two(tmp_path):
        assert HERE.with_suffix(".pid").read_text() == str(os.getpid())
    """
    assert "4 passed" in " ".join(run(test_a=text, test_b=text))


def test_a_failure_is_shown_with_its_output(run: Run) -> None:
    lines = run(test_a="def test_it():\n    print('on the way')\n    assert 1 == 2\n")
    assert "on the way" in lines
    assert any("assert 1 == 2" in line for line in lines)
    assert lines[-1] == "exit 1"


def test_trouble_with_fixtures_is_reported(run: Run) -> None:
    lines = run(
        test_a="""
        import pytest

        @pytest.fixture(scope="session")
        def late():
            yield
            raise OSError("at the end")

        @pytest.fixture
        def early():
            raise OSError("at the start")

        def test_late(late): pass
        def test_early(early): pass
        def test_skipped(): pytest.skip("not today")
        """
    )
    summary = " ".join(lines)
    assert "at the end" in summary
    assert "at the start" in summary
    assert "1 passed, 1 skipped, 2 errors" in summary


def test_a_worker_that_dies_fails_its_test_and_the_others_go_on(run: Run) -> None:
    lines = run(
        test_a="""
        import os, time

        def test_it():
            if os.fork():
                os._exit(7)
            time.sleep(3)  # the pipe to the parent is open still
            os._exit(0)

        def test_after_it(): pass
        """,
        test_b="def test_one(): pass\ndef test_two(): pass\n",
        test_c="def test_one(): pass\n",
    )
    assert any("the worker died in this test (exit code 7)" in line for line in lines)
    assert "1 failed, 4 passed" in " ".join(lines)


def test_the_first_failure_ends_the_run(run: Run) -> None:
    lines = run(
        "-x",
        test_a="def test_it(): assert False\n",
        test_b="import time\ndef test_it(): time.sleep(50)\n",
    )
    assert "1 failed" in " ".join(lines)
    assert lines[-1] == "exit 1"


def test_trouble_in_the_parent_ends_the_run(run: Run) -> None:
    lines = run(
        conftest="""
        import os
        PARENT = os.getpid()

        def pytest_runtest_logreport(report):
            if os.getpid() == PARENT:
                raise OSError("no room for a report")
        """,
        test_a="def test_it(): pass\n",
        test_b="import time\ndef test_it(): time.sleep(100)\n",
    )
    assert any("no room for a report" in line for line in lines)
    assert lines[-1] == "exit 3"


def test_the_results_can_be_written_as_xml(run: Run, tmp_path: Path) -> None:
    run(f"--junitxml={tmp_path}/results.xml", test_a="def test_it(): pass\n", test_b="def test_it(): pass\n")
    assert (tmp_path / "results.xml").read_text().count("<testcase") == 2
