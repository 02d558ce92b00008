"""Who may look, who may act, and what a page of another site can do: nothing."""

from __future__ import annotations

import logging
import time
from contextlib import closing
from pathlib import Path

import pytest

from semel import Semel, SQLiteStore
from semel.console import Access, Console
from semel.console import gate as gate_module
from semel.console.app import Pages
from semel.console.gate import allow_on_this_machine, is_loopback
from semel.core.messaging.messages import BuryMessage, Message
from semel.errors import ConfigurationError
from semel.stores.sqlite import migrate
from semel.trail import Trail
from tests.console.conftest import TOKEN, Asking
from tests.console.test_pages import until

PAGES = ("/", "/operations", "/stuck", "/outbox", "/letters", "/window", "/overview.json", "/live", "/nothing")


def test_a_console_without_a_lock_is_not_made(guard: Semel) -> None:
    for how in ({}, {"token": TOKEN, "allow": lambda request: None}, {"token": ""}):
        with pytest.raises(ConfigurationError, match="token"):
            Console(guard, **how)  # type: ignore[arg-type]


@pytest.mark.parametrize("path", PAGES)
def test_nobody_looks_without_the_token(anybody: Asking, path: str) -> None:
    answer = anybody.get(path)
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"].startswith("Bearer")
    assert "shop" not in answer.text


def test_the_token_opens_it_by_a_session_or_a_header(anybody: Asking) -> None:
    assert anybody.get("/", Authorization=f"Bearer {TOKEN}").status_code == 200
    assert anybody.get("/").status_code == 401
    answer = anybody.sign_in()
    assert (answer.status_code, answer.headers["location"]) == (303, "/")
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "samesite=strict" in cookie.lower()
    assert TOKEN not in cookie
    assert anybody.get("/").status_code == 200
    assert anybody.post("/sign-out", {"form": anybody.form()}).status_code == 303
    assert anybody.get("/").status_code == 401


def test_another_process_with_the_same_token_knows_the_session(operator: Asking, guard: Semel) -> None:
    same, other = (Asking(Console(guard, token=token)) for token in (TOKEN, "another"))
    for asking, status in ((same, 200), (other, 401)):
        asking.client.cookies = operator.client.cookies
        assert asking.get("/").status_code == status
        asking.close()


def test_a_session_ends(operator: Asking, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time()
    monkeypatch.setattr(gate_module.time, "time", lambda: now + gate_module.SESSION - 5)
    assert operator.get("/").status_code == 200
    monkeypatch.setattr(gate_module.time, "time", lambda: now + gate_module.SESSION + 5)
    assert operator.get("/").status_code == 401


@pytest.mark.parametrize(
    "cookie", ["", "x", "99999999999.aa.bb", "9" * 5000, "99999999999..", "é.é.é", "1.2." + "0" * 64]
)
def test_a_forged_session_opens_nothing(anybody: Asking, cookie: str) -> None:
    anybody.client.cookies.clear()
    header = {"Cookie": f"{anybody._console._gate.cookie}={cookie}".encode()}
    answer = anybody.run(anybody.client.get("/", headers=header))  # type: ignore[arg-type]
    assert answer.status_code == 401


def test_wrong_tokens_are_answered_late_and_few_are_looked_at(anybody: Asking, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate_module, "PENALTY", 0.2)

    async def storm() -> list[int]:
        import asyncio

        tries = (anybody.client.get("/", headers={"Authorization": f"Bearer {n}"}) for n in range(30))
        return sorted(answer.status_code for answer in await asyncio.gather(*tries))

    began = time.monotonic()
    statuses = anybody.run(storm())
    assert time.monotonic() - began >= 0.2
    assert statuses == [401] * gate_module.WRONG_AT_ONCE + [429] * (30 - gate_module.WRONG_AT_ONCE)
    assert anybody.get("/", Authorization=f"Bearer {TOKEN}").status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.test"},
        {"Origin": "null"},
        {"Sec_Fetch_Site": "cross-site"},
        {"Sec_Fetch_Site": "same-site"},
    ],
)
def test_a_form_of_another_site_does_nothing(
    operator: Asking, guard: Semel, headers: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    guard.run("pay", key="k1", call=lambda op: 1)
    record = guard.lookup("pay", "k1")
    assert record is not None
    form = {"form": operator.form(), "token": str(record.token)}
    path = f"/records/shop/{record.id.hex()}/forget"
    with caplog.at_level(logging.INFO, "semel.audit"):
        assert operator.post(path, form, **headers).status_code == 403
        assert operator.post(path, {**form, "form": "0" * 64}).status_code == 403
        assert operator.post(path, {"token": str(record.token)}).status_code == 403
        assert operator.post(path, {"token": str(record.token)}, Authorization="Basic YTpi").status_code == 403
    assert guard.lookup("pay", "k1") is not None
    assert caplog.text.count("refused=") == caplog.text.count("changed=false") == 4
    assert operator.post(path, form, Origin="http://console.test").status_code == 200
    assert guard.lookup("pay", "k1") is None


def test_who_may_only_look_cannot_act(reader: Asking, guard: Semel) -> None:
    guard.run("pay", key="k1", call=lambda op: 1)
    record = guard.lookup("pay", "k1")
    assert record is not None
    path = f"/records/shop/{record.id.hex()}/forget"
    assert reader.get(path).status_code == 403
    answer = reader.post(path, {"form": reader.form("/operations"), "token": str(record.token)})
    assert answer.status_code == 403
    assert guard.lookup("pay", "k1") is not None


def test_an_application_says_who_may_look(guard: Semel) -> None:
    async def allow(request: object) -> Access | None:
        return Access(who="ann") if request.headers.get("x-user") == "ann" else None  # type: ignore[attr-defined]

    asking = Asking(Console(guard, allow=allow))
    assert asking.get("/").status_code == 403
    assert asking.get("/", X_User="ann").status_code == 200
    asking.close()


@pytest.mark.parametrize(
    ("host", "client", "status"),
    [
        ("127.0.0.1:8088", "127.0.0.1", 200),
        ("localhost", "127.0.0.1", 200),
        ("[::1]:8088", "::1", 200),
        ("evil.test", "127.0.0.1", 403),  # its name was pointed to this machine
        ("127.0.0.1.evil.test", "127.0.0.1", 403),
        ("127.0.0.1", "10.0.0.7", 403),
        ("[", "127.0.0.1", 403),
    ],
)
def test_without_a_token_only_this_machine_looks(guard: Semel, host: str, client: str, status: int) -> None:
    import httpx

    asking = Asking(Console(guard, allow=allow_on_this_machine(Access())))
    transport = httpx.ASGITransport(app=asking._console, client=(client, 5))

    async def ask() -> int:
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as other:
            return (await other.get("/", headers={"Host": host})).status_code

    assert asking.run(ask()) == status
    asking.close()


def test_which_addresses_are_this_machine() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.9.9.9", "::1", "[::1]", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "example.com", "", "localhost.evil.test")))


@pytest.mark.parametrize("path", [*PAGES, "/sign-in", "/static/console.css"])
def test_every_answer_has_the_headers_that_keep_others_out(operator: Asking, path: str) -> None:
    if path == "/live":
        return  # a stream: looked at in Chromium
    headers = operator.get(path).headers
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    assert headers["x-frame-options"] == "DENY"
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["cache-control"] == ("no-store" if "static" not in path else "public, max-age=31536000, immutable")


def test_input_is_bounded(operator: Asking) -> None:
    assert operator.get("/operations?operation=" + "x" * 5000).status_code == 414
    assert operator.get("/operations?operation=" + "x" * 600).status_code == 400
    assert operator.post("/search", {"key": "x" * 40_000}).status_code == 413
    assert operator.post("/search", {f"f{n}": "" for n in range(100)}).status_code == 400
    for query in ("state=gone", "older=soon", "older=1e99", "older=-1s"):
        assert operator.get(f"/operations?{query}").status_code == 400, query
    assert operator.get("/operations?tenant=%00").status_code == 400
    lone = operator.client.post("/search", content='{"key": "\\ud800"}', headers={"Content-Type": "application/json"})
    assert operator.run(lone).status_code == 400
    assert operator.get("/records/shop/zz").status_code == 404
    assert operator.get(f"/records/nowhere/{'0' * 32}").status_code == 404
    assert operator.get(f"/records/shop/{'0' * 32}").status_code == 404
    assert operator.get("/letter/shop/" + "9" * 40).status_code == 404
    for path in ("/operations?after=nowhere", "/live?of=//[", "/live?of=/?" + "a%26" * 60, "/live?of=/nothing"):
        assert operator.get(path).status_code in (400, 404), path
    for path in ("//evil.test", "/\\evil.test", "https://evil.test", ""):
        answer = operator.post("/sign-in", {"token": TOKEN, "next": path, "form": operator.form("/sign-in")})
        assert answer.headers["location"] == "/"


def test_whoever_signs_in_gets_the_address_that_they_were_sent(anybody: Asking) -> None:
    address = "/operations?state=unknown&operation=pay"
    page = anybody.get(address).text
    hidden = page.partition('name="next" value="')[2].partition('"')[0].replace("&amp;", "&")
    assert hidden == address
    answer = anybody.post("/sign-in", {"token": TOKEN, "next": hidden, "form": anybody.form("/sign-in")})
    assert answer.headers["location"] == address


EVIL = "\"'><img src=x onerror=alert(1)>{{ 7 * 7 }}"


def test_it_escapes_what_services_say(tmp_path: Path) -> None:
    """Names, keys, errors, answers and messages: on pages, in their live parts, and before an act."""
    path = tmp_path / "evil.db"
    migrate(path)
    with (
        closing(SQLiteStore(path)) as store,
        closing(Trail(store, service=EVIL, interval=0.01)) as trail,
        Semel(store, on_event=trail) as guard,
    ):
        with pytest.raises(ArithmeticError):
            guard.run(EVIL, key=EVIL, call=fail, tenant=EVIL)
        guard.run(EVIL, key=EVIL, call=lambda: {EVIL: EVIL}, tenant=EVIL)
        message = Message(
            id=EVIL, type=EVIL, source=EVIL, time=1e9, data=EVIL.encode(), content_type=EVIL, destination=EVIL,
            stream=EVIL, subject=EVIL, headers={EVIL: EVIL},
        )  # fmt: skip
        store.execute(BuryMessage(EVIL, message, EVIL, 1))
        record = guard.lookup(EVIL, EVIL, tenant=EVIL)
        assert record is not None
        everything = Access(who=EVIL, act=True, show_keys=True, show_bodies=True)
        console = Console({"shop": guard}, allow=lambda request: everything)
        asking = Asking(console)
        story = f"/records/shop/{record.id.hex()}"
        until(asking, f"{story}.json", lambda view: len(view["timeline"]) >= 4)
        for page in ("/", "/operations", story, f"{story}/forget", "/letters", "/letter/shop/1"):
            text = asking.get(page).text
            assert "<img src=x" not in text, page
            assert "&lt;img src=x onerror=alert(1)&gt;{{ 7 * 7 }}" in text, page
        live = asking.run(console._view("/", everything, {}))
        part = Pages(None).render_live("overview", view=live, base="", access=everything, several=False)
        assert "<img src=x" not in part
        assert "&lt;img src=x" in part
        asking.close()


def fail() -> None:
    raise ArithmeticError(EVIL)


def test_nobody_writes_lines_into_the_audit_log(reader: Asking, guard: Semel, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "semel.audit"):
        form = reader.form("/operations")
        reader.post(f"/records/shop/{'0' * 32}/x%0Aconsole: ann: release on shop: changed", {"form": form})
    lines = [record.getMessage() for record in caplog.records if record.name == "semel.audit"]
    assert len(lines) == 1
    assert "\n" not in lines[0]
