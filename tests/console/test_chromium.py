"""The console in Chromium: no complaint, nothing from elsewhere, keyboard only, light and dark, phone to laptop."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from semel import Semel, SQLiteStore
from semel.console import Access, Console
from semel.stores.sqlite import migrate
from semel.trail import Trail
from tests.console.test_pages import dead, doubt
from tests.http.payments_service import serving
from tests.servers import Browser, ChromiumServer

pytestmark = [pytest.mark.chromium, pytest.mark.server, pytest.mark.process]

TAB, ENTER = "\ue004", "\ue007"
SIZES = {"phone": (360, 740), "laptop": (1366, 768)}


def until(holds: Callable[[], Any]) -> Any:
    end = time.monotonic() + 60
    while not (found := holds()):
        assert time.monotonic() < end
        time.sleep(0.02)
    return found


class Served:
    """A console on a socket, its guard, and addresses of pages that have something on them."""

    def __init__(self, guard: Semel, console: Console, url: str, paths: list[str]) -> None:
        self.guard = guard
        self.console = console
        self.url = url
        self.paths = paths


@contextmanager
def on_a_socket(app: Console) -> Iterator[str]:
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        until(lambda: server.started)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        app.stop_streams()
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    path = tmp_path_factory.mktemp("console") / "shop.db"
    migrate(path)
    store = SQLiteStore(path)
    with Trail(store, service="payments", interval=0.05) as trail, Semel(store, on_event=trail) as guard:
        for number in range(30):
            for _ in range(1 + number % 3):
                guard.run("POST /payments" if number % 2 else "orders.place-with-a-long-name", key=f"key-{number}",
                          call=lambda: {"id": 7}, tenant="alice")  # fmt: skip
        lost = doubt(guard, "lost")
        for number in range(3):
            store.execute(dead(number))
        done = guard.lookup("POST /payments", "key-1", tenant="alice")
        assert done is not None
        console = Console({"shop": guard}, allow=lambda request: Access(who="ann", act=True, show_keys=True))
        with on_a_socket(console) as url:
            paths = ["/", "/operations", f"/records/shop/{done.id.hex()}", f"/records/shop/{lost.hex()}", "/stuck",
                     f"/records/shop/{lost.hex()}/resolve", "/outbox", "/letters", "/letter/shop/1", "/letters/purge",
                     "/window?qps=200&retry_budget=15m", "/operations?state=running"]  # fmt: skip
            yield Served(guard, console, url, paths)
        store.close()


@pytest.fixture(scope="module")
def one_browser(chromium: ChromiumServer) -> Iterator[Browser]:
    with chromium.browser() as browser:
        yield browser


@pytest.fixture
def browser(one_browser: Browser) -> Browser:
    """The browser, without what it has noted in other tests."""
    one_browser.open("about:blank")
    one_browser.complaints()
    one_browser.requests()
    return one_browser


FAULTS = """
const faults = [];
const parts = (colour) => colour.match(/[\\d.]+/g).map(Number);
const linear = (c) => c / 255 <= 0.04045 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4;
const light = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
const ground = (node) => {
  for (; node !== null; node = node.parentElement) {
    const colour = parts(getComputedStyle(node).backgroundColor);
    if (colour.length === 3 || colour[3] > 0) return colour;
  }
};
const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (texts.nextNode()) {
  const node = texts.currentNode.parentElement;
  const box = node.getBoundingClientRect();
  if (texts.currentNode.data.trim() === "" || box.width < 2 || node.closest("script, datalist, thead")) continue;
  const [one, other] = [light(parts(getComputedStyle(node).color)), light(ground(node))].sort((a, b) => b - a);
  if ((one + 0.05) / (other + 0.05) < 4.5) faults.push(`contrast of ${texts.currentNode.data.trim()}`);
  if (!node.closest(".skip") && (box.left < -1 || box.right > innerWidth + 1)) {
    faults.push(`cut off: ${texts.currentNode.data.trim()}`);
  }
}
for (const field of document.querySelectorAll("input:not([type=hidden]), select, textarea")) {
  if (field.labels.length === 0) faults.push(`no label: ${field.name}`);
}
for (const target of document.querySelectorAll("button, .button, nav a")) {
  if (target.getBoundingClientRect().height < 24) faults.push(`hard to hit: ${target.innerText}`);
}
const ids = [...document.querySelectorAll("[id]")].map((each) => each.id);
if (new Set(ids).size < ids.length) faults.push(`an id twice: ${ids}`);
if (document.querySelectorAll("h1").length !== 1) faults.push("not one h1");
if (document.querySelector("img:not([alt])") !== null) faults.push("an image without alt");
return faults;
"""
"""What a reader of the page would stumble over, as a script that returns it."""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_page_on_every_screen(browser: Browser, served: Served, scheme: str, tmp_path: Path) -> None:
    grounds = set()
    for name, (width, height) in SIZES.items():
        browser.look(width, height, scheme)
        for number, path in enumerate(served.paths):
            browser.open(served.url + path)
            wide = browser.run("return document.documentElement.scrollWidth - document.documentElement.clientWidth")
            assert wide <= 0, f"{path} on a {name} is {wide} pixels too wide"
            assert browser.run(FAULTS) == [], f"{path} on a {name}"
            grounds.add(browser.run("return getComputedStyle(document.body).backgroundColor"))
            (tmp_path / f"{number}-{name}-{scheme}.png").write_bytes(browser.screenshot())
    assert grounds == {"rgb(246, 246, 244)" if scheme == "light" else "rgb(18, 20, 23)"}
    assert browser.complaints() == []
    asked = [request["url"] for request in browser.requests()]
    assert asked
    assert [url for url in asked if not url.startswith(served.url + "/")] == []


def test_it_is_used_by_the_keyboard_alone(browser: Browser, served: Served) -> None:
    browser.look(*SIZES["laptop"])
    browser.open(served.url + "/operations")
    browser.press(TAB)
    assert browser.run("return document.activeElement.className") == "skip"
    browser.press(ENTER)
    assert browser.run("return document.activeElement.id") == "main"
    browser.press(TAB)
    assert browser.run("return document.activeElement.name") == "key"
    assert browser.run("return getComputedStyle(document.activeElement).outlineStyle") == "solid"
    browser.press(*"key-1", TAB, *"POST /payments", TAB, *"alice", ENTER)
    until(lambda: "/records/shop/" in browser.run("return location.pathname"))
    assert "POST /payments" in browser.run("return document.querySelector('h1').innerText")
    seen = []
    for _ in range(40):
        browser.press(TAB)
        seen.append(browser.run("return document.activeElement.innerText"))
        if seen[-1].startswith("Drop the stored answer"):
            break
    assert seen[-1].startswith("Drop the stored answer"), seen
    browser.press(ENTER)
    until(lambda: browser.run("return document.querySelector('button.danger') !== null"))


def test_a_page_follows_what_happens_and_rests_while_it_is_hidden(browser: Browser, served: Served) -> None:
    browser.open(served.url + "/")
    asked = "return document.querySelector('.answers .figure').innerText"
    before = int(until(lambda: browser.run(asked)))
    until(lambda: browser.run("return document.getElementById('live-sign').innerText") == "live")
    browser.run("window.same = document.querySelector('.answers'); document.querySelector('.answers a').focus()")
    served.guard.run("orders.place", key="live", call=lambda: 1)
    until(lambda: int(browser.run(asked)) > before)
    assert browser.run("return window.same === document.querySelector('.answers')"), "the page was drawn anew"
    assert "In doubt" in browser.run("return document.activeElement.innerText"), "the focus is lost"
    hide = "Object.defineProperty(document, 'hidden', {value: %s, configurable: true});"
    browser.run(hide % "true" + "document.dispatchEvent(new Event('visibilitychange'))")
    assert browser.run("return document.getElementById('live-sign').innerText") == "paused"
    until(lambda: served.console._streams == 0)
    browser.run(hide % "false" + "document.dispatchEvent(new Event('visibilitychange'))")
    until(lambda: browser.run("return document.getElementById('live-sign').innerText") == "live")
    assert browser.complaints() == []


def test_who_is_not_signed_in_signs_in_and_comes_back_when_the_session_ends(browser: Browser, served: Served) -> None:
    console = Console({"shop": served.guard}, token="a token that nobody guesses")
    with on_a_socket(console) as url:
        browser.look(*SIZES["phone"])
        browser.open(url + "/stuck")
        assert browser.run("return document.documentElement.scrollWidth - document.documentElement.clientWidth") <= 0
        assert browser.run(FAULTS) == []
        assert browser.run("return document.activeElement.name") == "token"
        browser.press(*"a token that nobody guesses", ENTER)
        until(lambda: browser.run("return document.getElementById('live-sign')?.innerText") == "live")
        assert browser.run("return location.pathname") == "/stuck"
        assert browser.run("return document.cookie") == ""
        browser.ask("DELETE", "/cookie")
        console.stop_streams()
        until(lambda: browser.run("return document.querySelector('h1').innerText") == "Sign in")
        browser.open("about:blank")


def test_a_record_in_doubt_is_resolved_by_a_person(browser: Browser, served: Served) -> None:
    id = doubt(served.guard, "by a person")
    browser.open(f"{served.url}/records/shop/{id.hex()}")
    browser.run("window.same = document.querySelector(`a[href$='/resolve']`)")
    until(
        lambda: "nobody can tell whether" in browser.run("return document.querySelector('.timeline')?.innerText ?? ''")
    )
    assert browser.run("return window.same.isConnected"), "a button moved away from under the pointer"
    browser.click("a[href$='/resolve']")
    until(lambda: browser.run("return document.querySelector('textarea') !== null"))
    browser.type("textarea", '{"id": "pay_7"}')
    browser.click("button.danger")
    until(lambda: browser.run("return document.querySelector('h1').innerText") == "Done")
    assert served.guard.run("pay", key="by a person", call=lambda: 1 / 0) == {"id": "pay_7"}
    browser.click("main a.button")
    until(lambda: "Settled by a person" in browser.run("return document.body.innerText"))


def test_the_demo_begins_with_the_console_and_its_buttons(
    browser: Browser, tmp_path: Path, starts_process: None
) -> None:
    browser.look(*SIZES["laptop"])
    browser.complaints()
    with serving(tmp_path, workers=2) as payments:
        browser.open(payments.url + "/")
        until(lambda: browser.run("return document.documentElement.dataset.ready === 'true'"))
        log = "return document.getElementById('log').innerText"
        browser.click("#twice")
        until(lambda: "Sent twice, paid once" in browser.run(log) and "its story" in browser.run(log))
        assert payments.stats()["payments"] == payments.stats()["executions"] == 1
        assert browser.complaints() == []
        browser.click("#kill")

        def survived() -> bool:
            payments.service.tend()
            return "The worker died in the middle" in browser.run(log)

        until(survived)
        assert payments.stats()["payments"] == 2
        until(lambda: browser.run("return document.querySelectorAll('#log a').length") == 2)
        browser.click("#log li:first-child a")
        until(lambda: "took over" in browser.run("return document.body.innerText"))
