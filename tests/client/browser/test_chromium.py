"""semel.js in Chromium, on the page of the demo's form: clicks, reloads and the back button make one payment each.

What was sent is read from the browser's own network log, and what was done from the service's tables.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from typing import Any

import pytest

from tests.http.payments_service import ALICE, Payments, serving
from tests.servers import Browser, ChromiumServer

pytestmark = [pytest.mark.chromium, pytest.mark.server, pytest.mark.process]

SLOW = 1500
"""Milliseconds of a slow answer: long enough to reload in the middle of it."""
customers = (f"browser-{number}" for number in itertools.count())


@pytest.fixture(scope="module")
def payments(tmp_path_factory: pytest.TempPathFactory, starts_process: None) -> Iterator[Payments]:
    with serving(tmp_path_factory.mktemp("browser"), None, workers=1) as running:
        yield running


@pytest.fixture(scope="module")
def opened(chromium: ChromiumServer) -> Iterator[Browser]:
    with chromium.browser("--disable-features=BackForwardCache") as browser:
        yield browser


class Page:
    """The demo's page in a tab, and what came of it."""

    def __init__(self, browser: Browser, payments: Payments) -> None:
        self.browser = browser
        self.payments = payments
        self.customer = next(customers)
        browser.open(payments.url + "/try")
        browser.run("sessionStorage.clear()")
        self.load(lambda: browser.open(payments.url + "/try"))
        browser.requests()
        self.fill(SLOW)

    def load(self, how: Callable[[], None]) -> None:
        how()
        until(lambda: self.browser.run("return document.documentElement.dataset.ready === 'true'"))

    def fill(self, delay: int, amount: int = 1250) -> None:
        self.browser.type("[name=customer]", self.customer)
        self.browser.type("[name=amount]", str(amount))
        self.browser.type("[name=delay]", str(delay))

    def runs(self) -> int:
        """How often the handler has started."""
        return self.payments.stats()["executions"]

    def start(self) -> None:
        """Click, and wait until the handler runs."""
        before = self.runs()
        self.browser.click("#pay button")
        until(lambda: self.runs() > before)

    def rows(self, count: int = 1) -> list[list[str]]:
        """What the page says of each answer, the last one first."""
        script = (
            "return [...document.querySelectorAll('#log tr')].slice(1).map(r => [...r.cells].map(c => c.innerText))"
        )
        until(lambda: len(self.browser.run(script)) >= count)
        found: list[list[str]] = self.browser.run(script)
        return found

    def keys(self) -> list[str]:
        """The keys that the browser has sent since the last look."""
        posts = [each for each in self.browser.requests() if each["method"] == "POST"]
        return [{name.lower(): value for name, value in each["headers"].items()}["idempotency-key"] for each in posts]

    def made(self) -> int:
        """How many payments this customer has made."""
        answer = self.payments.client.get("/payments", params={"limit": 100}, headers=ALICE).json()
        return [each["customer"] for each in answer["payments"]].count(self.customer)

    def stored(self) -> int:
        found: int = self.browser.run("return sessionStorage.length")
        return found


def until(holds: Callable[[], Any]) -> None:
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.fixture
def page(opened: Browser, payments: Payments) -> Page:
    return Page(opened, payments)


def test_clicking_twice_on_a_slow_answer_pays_once(page: Page) -> None:
    before = page.runs()
    page.start()
    page.browser.click("#pay button")
    answers = page.rows(2)
    assert [row[:3] for row in answers] == [["succeeded", "201", "false"]] * 2
    assert answers[0] == answers[1]
    assert (page.made(), page.runs() - before, len(set(page.keys())), page.stored()) == (1, 1, 1, 0)


def test_after_an_answer_the_same_content_is_a_new_payment(page: Page) -> None:
    page.fill(0)
    page.browser.click("#twice")
    page.rows(2)
    page.browser.click("#pay button")
    assert len({row[4] for row in page.rows(3)}) == 2
    assert (page.made(), len(set(page.keys()))) == (2, 2)


def test_reloading_in_mid_flight_and_paying_again_pays_once(page: Page) -> None:
    before = page.runs()
    page.start()
    assert page.stored() == 1
    page.load(page.browser.reload)
    assert "In doubt" in page.browser.run("return document.getElementById('pending').innerText")
    page.fill(SLOW)
    page.browser.click("#pay button")
    assert page.rows()[0][:3] == ["succeeded", "201", "true"]
    keys = page.keys()
    assert len(keys) >= 2
    assert len(set(keys)) == 1
    assert (page.made(), page.runs() - before, page.stored()) == (1, 1, 0)
    assert page.browser.run("return document.getElementById('pending').innerText") == ""


def test_leaving_in_mid_flight_going_back_and_paying_again_pays_once(page: Page) -> None:
    before = page.runs()
    page.start()
    page.browser.open(page.payments.url + "/stats")
    page.load(page.browser.back)
    page.fill(SLOW)
    page.browser.click("#pay button")
    assert page.rows()[0][:2] == ["succeeded", "201"]
    keys = page.keys()
    assert len(keys) >= 2
    assert len(set(keys)) == 1
    assert (page.made(), page.runs() - before, page.stored()) == (1, 1, 0)


def test_a_page_that_comes_back_alive_has_its_request_still(chromium: ChromiumServer, payments: Payments) -> None:
    """With the back/forward cache the page goes on where it was left."""
    with chromium.browser() as browser:
        page = Page(browser, payments)
        page.start()
        browser.open(payments.url + "/stats")
        page.load(browser.back)
        browser.click("#pay button")
        assert page.rows()[0][:2] == ["succeeded", "201"]
        assert (page.made(), len(set(page.keys()))) == (1, 1)


def test_other_content_after_a_reload_in_mid_flight_is_a_new_payment_and_the_page_hears_of_the_first(
    page: Page,
) -> None:
    page.start()
    page.load(page.browser.reload)
    page.fill(0, amount=77)
    page.browser.click("#pay button")
    assert page.rows()[0][0] == "succeeded"
    first, *_, second = page.keys()
    assert first != second
    assert first in page.browser.run("return document.getElementById('pending').innerText")
    until(lambda: page.made() == 2)


def test_a_worker_that_dies_after_it_has_paid(page: Page) -> None:
    """The retry finds the row. Chromium itself retries once if the lost connection was used before."""
    before = page.payments.stats()["found_done"]
    script = """
      return import("/semel.js").then(({ Semel }) => {
        const simulate = { crash: "after" };
        const body = JSON.stringify({ amount: 1, currency: "EUR", customer: arguments[0], simulate });
        const headers = { Authorization: "Bearer sk_alice", "Content-Type": "application/json" };
        const sending = new Semel({ firstPause: 50 }).send("/payments", { method: "POST", headers, body });
        sending.then((result) => { window.result = result; });
      })"""
    page.browser.run(script, page.customer)

    def answered() -> Any:
        page.payments.service.tend()
        return page.browser.run("return window.result && result.outcome")

    until(answered)
    assert answered() == "succeeded"
    assert (page.made(), page.payments.stats()["found_done"] - before, len(set(page.keys()))) == (1, 1, 1)


def test_without_session_storage_a_double_click_still_pays_once(page: Page) -> None:
    script = """
      Object.defineProperty(window, "sessionStorage", { get() { throw new Error("refused"); }, configurable: true });
      return import("/semel.js").then(async ({ Semel }) => {
        const heard = [];
        const semel = new Semel({ onStorageFailure: (error) => heard.push(error.message) });
        const headers = { Authorization: "Bearer sk_alice", "Content-Type": "application/json" };
        const body = JSON.stringify({ amount: 1, currency: "EUR", customer: arguments[0] });
        const send = () => semel.send("/payments", { method: "POST", headers, body });
        const [one, two] = await Promise.all([send(), send()]);
        return [one.outcome, one.key === two.key, semel.storage, heard];
      })"""
    try:
        assert page.browser.run(script, page.customer) == ["succeeded", True, "memory", ["refused"]]
    finally:
        page.browser.reload()
    assert page.made() == 1


class Recorder(ThreadingHTTPServer):
    """A server that sends POST requests on to ``target``, if it has one, and records the keys that reach it."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), RecordingHandler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.target: str | None = None
        self.keys: list[str | None] = []


class RecordingHandler(BaseHTTPRequestHandler):
    server: Recorder

    def do_GET(self) -> None:
        self._answer(200, (files("semel") / "client/browser/semel.js").read_bytes())

    def do_OPTIONS(self) -> None:
        self._answer(200)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.keys.append(self.headers.get("Idempotency-Key"))
        self._answer(307 if self.server.target else 200)

    def _answer(self, status: int, body: bytes = b"") -> None:
        self.send_response(status)
        lines = {"Content-Type": "text/javascript", "Content-Length": str(len(body))}
        for name in ("Origin", "Headers", "Methods"):
            lines[f"Access-Control-Allow-{name}"] = "*"
        if status == 307:
            lines["Location"] = str(self.server.target)
        for name, value in lines.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        return


@pytest.fixture
def two_origins() -> Iterator[tuple[Recorder, Recorder]]:
    with Recorder() as ours, Recorder() as theirs:
        ours.target = theirs.url
        for each in (ours, theirs):
            threading.Thread(target=each.serve_forever, args=(0.01,)).start()
        yield ours, theirs
        ours.shutdown()
        theirs.shutdown()


@pytest.mark.parametrize(("mode", "reaches"), [("", False), ("cors", True)])
def test_the_key_does_not_follow_a_redirect_to_another_origin_unless_the_page_says_so(
    opened: Browser, two_origins: tuple[Recorder, Recorder], mode: str, reaches: bool
) -> None:
    ours, theirs = two_origins
    opened.open(ours.url)
    script = """
      return import("/semel.js").then(async ({ Semel }) => {
        const init = arguments[0] ? { mode: arguments[0] } : {};
        const { outcome } = await new Semel({ attempts: 1 }).send("/pay", { method: "POST", body: "x", ...init });
        return outcome;
      })"""
    assert opened.run(script, mode) == ("succeeded" if reaches else "unknown")
    assert (len(ours.keys), theirs.keys) == (1, ours.keys if reaches else [])
