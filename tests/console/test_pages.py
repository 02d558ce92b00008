"""What the pages say, as HTML and as JSON, and what came of each act."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from semel import MemoryStore, Semel, SQLiteStore
from semel.console import Access, Console, views, watched, ways, words
from semel.core.keys import identity, identity_hash
from semel.core.messaging.messages import BuryMessage, Message
from semel.core.ops import Claim, Record
from semel.core.states import State, Takeover
from semel.core.trail.minutes import MinuteCounter, minute_row
from semel.core.trail.moments import KeepTrail, ReadMinutes
from semel.errors import OutcomeUnknown, StoreUnavailable
from semel.stores.sqlite import migrate
from semel.trail import Trail
from tests.console.conftest import Asking

PAGES = ("/", "/overview", "/operations", "/stuck", "/outbox", "/letters", "/window")


def claim(store: Any, key: str, lease: float, takeover: Takeover = Takeover.RETRY) -> bytes:
    """Claim a key as a worker does that never reports again. Returns the identity."""
    id = identity("", "pay", key, identity_hash(b""))
    store.execute(Claim(id, 7, b"", lease, 86400.0, takeover, "", "pay", key))
    return id


def doubt(guard: Semel, key: str) -> bytes:
    """Have a record whose outcome nobody knows."""
    id = claim(guard.store, key, 0.0001, Takeover.REJECT)
    time.sleep(0.001)
    with pytest.raises(OutcomeUnknown):
        guard.run("pay", key=key, call=lambda: 1)
    return id


def found(guard: Semel, key: str) -> Record | None:
    return guard.lookup("pay", key)


def until(asking: Asking, path: str, holds: Callable[[Any], Any]) -> Any:
    """Ask until the history says so: a thread writes it."""
    end = time.monotonic() + 30
    while not holds(view := asking.get(path).json()):
        assert time.monotonic() < end, view
        time.sleep(0.02)
    return view


@pytest.mark.parametrize("path", PAGES)
def test_every_page_has_a_twin_in_json(operator: Asking, path: str) -> None:
    page = operator.get(path)
    assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    by_header = operator.get(path, Accept="application/json")
    by_name = operator.get(("" if path == "/" else path) + ".json" if path != "/" else "/overview.json")
    for twin in (by_header, by_name):
        assert (twin.status_code, twin.headers["content-type"]) == (200, "application/json")
    assert by_header.json().keys() == by_name.json().keys()
    for landmark in ("<main", "<nav", "<header", 'class="skip"', "<h1>", 'lang="en"'):
        assert landmark in page.text
    assert page.text.count("<table>") == page.text.count("<caption>")


def test_the_overview_counts_what_was_asked_ran_and_was_absorbed(operator: Asking, guard: Semel) -> None:
    for key in ("a", "b", "c"):
        for _ in range(3):
            guard.run("pay", key=key, call=lambda: "paid")
    view = until(operator, "/overview.json", lambda view: view["totals"]["asked"] >= 9)
    totals = view["totals"]
    assert (totals["asked"], totals["ran"], totals["absorbed"], totals["refused"]) == (9, 3, 6, 0)
    assert (totals["in_doubt"], totals["stuck"]) == (0, 0)
    (row,) = view["operations"]
    assert (row["operation"], row["store"], row["asked"], row["hit_rate"]) == ("pay", "shop", 9, 6 / 9)
    assert 0 < row["first"]["p50"] <= row["first"]["p99"] < 5
    assert 0 < row["replay"]["p50"] <= row["replay"]["p99"] < 5
    assert [sum(row["series"][name]) for name in ("ran", "absorbed", "refused")] == [3, 6, 0]
    assert len(row["series"]["ran"]) == 60
    page = operator.get("/").text
    assert "as it should be" in page
    assert "<svg" in page


def test_an_hour_of_history_is_read_little_by_little_and_counted_once(store: MemoryStore) -> None:
    counter, now = MinuteCounter(), time.time()
    for minute in range(60):
        counter.add(now - 60 * minute, "pay", "started", 0.001)
    rows = tuple(minute_row(counts) for counts in counter.take_changed())
    store.execute(KeepTrail(b"a writer", (), rows, 1e6, 1e6))
    with Semel(store) as guard:
        asking = Asking(Console(guard, allow=lambda request: Access()))
        first = asking.get("/overview.json").json()
        assert first["reading"]
        assert 0 < first["totals"]["asked"] < 60
        view = until(asking, "/overview.json", lambda view: not view["reading"])
        assert view["totals"]["asked"] >= 59  # the present minute may be another one by now
        assert asking.get("/overview.json").json()["totals"]["asked"] == view["totals"]["asked"]
        asking.close()


def test_a_page_reads_only_the_newest_minutes_again(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    counter, now = MinuteCounter(), time.time()
    for minute in range(60):
        counter.add(now - 60 * minute, "pay", "started", 0.001)
    rows = tuple(minute_row(counts) for counts in counter.take_changed())
    store.execute(KeepTrail(b"a writer", (), rows, 1e6, 1e6))
    read: list[ReadMinutes] = []
    with Semel(store) as guard:
        asking = Asking(Console(guard, allow=lambda request: Access()))
        until(asking, "/overview.json", lambda view: not view["reading"])
        monkeypatch.setattr(watched, "FRESH", -1.0)
        execute = MemoryStore.execute

        def noting(self: MemoryStore, op: Any) -> Any:
            read.extend([op] if isinstance(op, ReadMinutes) else [])
            return execute(self, op)

        monkeypatch.setattr(MemoryStore, "execute", noting)
        assert asking.get("/overview.json").json()["totals"]["asked"] >= 58
        assert read
        assert sum(op.until - op.since for op in read) <= 6 * 60  # the newest, and one that is read again now and then
        asking.close()


def test_without_a_history_the_newest_records_are_counted(store: MemoryStore) -> None:
    with Semel(store) as guard:
        guard.run("pay", key="a", call=lambda: 1)
        asking = Asking(Console(guard, allow=lambda request: Access()))
        view = asking.get("/overview.json").json()
        assert not view["history"]
        assert [(row["operation"], row["states"]) for row in view["sampled"]] == [("pay", {"done": 1})]
        page = asking.get("/").text
        assert "No calls in the last hour" in page
        assert "Trail(" in page
        asking.close()


def test_doubt_is_the_first_thing_that_is_seen(operator: Asking, guard: Semel) -> None:
    id = doubt(guard, "k1")
    claim(guard.store, "k2", 0.0001)
    view = operator.get("/overview.json").json()
    assert (view["totals"]["in_doubt"], view["totals"]["stuck"]) == (1, 1)
    assert 'class="alarm"' in operator.get("/").text
    stuck = operator.get("/stuck.json").json()
    assert [(group["state"], group["count"]) for group in stuck["groups"]] == [
        ("unknown", 1), ("abandoned", 1), ("running", 0),
    ]  # fmt: skip
    assert stuck["groups"][0]["records"][0]["id"] == id.hex()
    page = operator.get("/stuck").text
    assert "nobody can tell" in page
    assert "It did not happen" in page


def test_a_record_in_doubt_that_is_not_among_the_newest_is_known_by_its_history(
    operator: Asking, guard: Semel, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (views, watched):
        monkeypatch.setattr(module, "LOOK", 2)
    id = doubt(guard, "k1")
    for key in ("a", "b", "c"):
        guard.run("pay", key=key, call=lambda: 1)
    view = until(operator, "/overview.json", lambda view: view["totals"]["in_doubt"])
    assert (view["totals"]["in_doubt"], view["looked_at"]) == (1, 2)
    (group, *_) = operator.get("/stuck.json").json()["groups"]
    assert [record["id"] for record in group["records"]] == [id.hex()]
    assert act(operator, id, "release").json()["changed"]
    until(operator, "/overview.json", lambda view: not view["totals"]["in_doubt"])
    assert "none among the newest records" in operator.get("/").text


def test_records_are_listed_with_filters_and_pages(reader: Asking, guard: Semel) -> None:
    for number in range(60):
        guard.run(
            "pay" if number % 2 else "refund", key=f"k{number}", call=lambda: 1, tenant="t" if number < 10 else None
        )
    view = reader.get("/operations.json").json()
    assert len(view["records"]) == 50
    more = reader.get("/operations.json", Accept="application/json").json()
    rest = reader.run(reader.client.get("/operations.json", params={"after": view["next"]})).json()
    keys = {record["key"] for record in (*view["records"], *rest["records"])}
    assert len(keys) == 60
    # Their times are told from ages, and may differ by one of their last digits.
    assert [record["id"] for record in more["records"]] == [record["id"] for record in view["records"]]
    for query, count in (
        ("operation=pay", 30),
        ("tenant=t", 10),
        ("state=running", 0),
        ("state=done&operation=refund&tenant=t", 5),
        ("older=1h", 0),
    ):
        assert len(reader.get(f"/operations.json?{query}").json()["records"]) == count, query
    assert "No record fits" in reader.get("/operations?state=running").text
    assert 'rel="next"' in reader.get("/operations").text


def test_a_key_is_found_with_or_without_its_operation(reader: Asking, guard: Semel) -> None:
    guard.run("pay", key="k1", call=lambda: 1)
    guard.run("pay", key="k2", call=lambda: 1, tenant="t")
    first, second = found(guard, "k1"), guard.lookup("pay", "k2", tenant="t")
    assert first is not None
    assert second is not None
    form = reader.form("/operations")
    for fields, id in (
        ({"key": "k1"}, first.id),
        ({"key": " k1 ", "operation": "pay"}, first.id),
        ({"key": "k2", "tenant": "t"}, second.id),
        ({"key": first.id.hex()}, first.id),
    ):
        answer = reader.post("/search", {**fields, "form": form})
        assert (answer.status_code, answer.headers["location"]) == (303, f"/records/shop/{id.hex()}")
    for fields in ({"key": "k2"}, {"key": "k1", "operation": "refund"}, {"key": "k1", "tenant": "x"}):
        assert reader.post("/search", {**fields, "form": form}).status_code == 404
    assert reader.post("/search", {"key": "", "form": form}).status_code == 400
    assert reader.post("/search", {"key": "k1"}).status_code == 403


def test_keys_are_masked_and_answers_hidden_unless_allowed(operator: Asking, reader: Asking, guard: Semel) -> None:
    guard.run("pay", key="4111-1111-1111-1111", call=lambda: {"secret": "s3cret"}, tenant="acme-corporation")
    record = guard.lookup("pay", "4111-1111-1111-1111", tenant="acme-corporation")
    assert record is not None
    path = f"/records/shop/{record.id.hex()}"
    for place in (path, "/operations"):
        for shown in (operator.get(place).text, operator.get(f"{place}.json").text):
            assert "1111-1111" not in shown
            assert "acme-corporation" not in shown
            assert "s3cret" not in shown
    outcome = operator.get(f"{path}.json").json()["outcome"]
    assert (outcome["kind"], outcome["hidden"]) == ("result", True)
    assert reader.get(f"{path}.json").json()["outcome"]["content"] == {"secret": "s3cret"}
    assert "s3cret" in reader.get(path).text
    assert "4111-1111-1111-1111" in reader.get(path).text


def test_the_story_of_a_key_across_hops(operator: Asking, guard: Semel) -> None:
    def pay(op: Any) -> str:
        guard.run("mail", key=f"{op.key}-mail", call=lambda: "sent")
        return "paid"

    with pytest.raises(ZeroDivisionError):
        guard.run("pay", key="k1", call=lambda: 1 / 0)
    for _ in range(2):
        guard.run("pay", key="k1", call=pay)
    record = found(guard, "k1")
    assert record is not None
    view = until(operator, f"/records/shop/{record.id.hex()}.json", lambda view: len(view["timeline"]) >= 7)
    lines = [(line["kind"], line["operation"], line["here"]) for line in view["timeline"]]
    assert lines == [
        ("started", "pay", True),
        ("released", "pay", True),
        ("started", "pay", True),
        ("started", "mail", False),
        ("completed", "mail", False),
        ("completed", "pay", True),
        ("replayed", "pay", True),
    ]
    assert [(hop["operation"], hop["depth"], hop["current"]) for hop in view["hops"]] == [
        ("pay", 0, True), ("mail", 1, False),
    ]  # fmt: skip
    page = operator.get(f"/records/shop/{record.id.hex()}").text
    assert "A duplicate got the stored answer" in page
    assert "ZeroDivisionError" in page


def test_a_record_is_found_from_the_history_in_another_store(store: MemoryStore) -> None:
    with Trail(store, service="payments", interval=0.01) as trail, Semel(MemoryStore(), on_event=trail) as guard:
        guard.run("pay", key="k1", call=lambda: 1)
        record = found(guard, "k1")
        assert record is not None
        with Semel(store) as history:
            asking = Asking(Console({"history": history, "shop": guard}, allow=lambda request: Access()))
            view = until(asking, f"/records/history/{record.id.hex()}.json", lambda view: len(view["timeline"]) >= 2)
            assert (view["store"], view["state"]) == ("shop", "done")
            asking.close()


# Acting


def act(asking: Asking, id: bytes, way: str, **fields: str) -> Any:
    path = f"/records/shop/{id.hex()}/{way}"
    page = asking.get(path).text
    token = page.partition('name="token" value="')[2].partition('"')[0]
    form = page.partition('name="form" value="')[2].partition('"')[0]
    return asking.post(path, {"token": token, "form": form, **fields}, Accept="application/json")


def test_release_frees_the_key_and_is_audited(operator: Asking, guard: Semel, caplog: pytest.LogCaptureFixture) -> None:
    id = doubt(guard, "k1")
    page = operator.get(f"/records/shop/{id.hex()}/release").text
    assert "it will happen twice" in page
    with caplog.at_level(logging.INFO, "semel.audit"):
        answer = act(operator, id, "release")
    assert (answer.status_code, answer.json()["changed"]) == (200, True)
    assert found(guard, "k1") is None
    assert guard.run("pay", key="k1", call=lambda: "again") == "again"
    (line,) = [record.getMessage() for record in caplog.records if record.name == "semel.audit"]
    assert line.startswith("release by token from 127.0.0.1 at 20")
    assert line.endswith(f'Z: via="console" store="shop" id="{id.hex()}" operation="pay" changed=true')


def test_resolve_stores_the_result(operator: Asking, guard: Semel) -> None:
    id = doubt(guard, "k1")
    refused = act(operator, id, "resolve", result="paid")
    assert (refused.status_code, refused.json()["changed"]) == (409, False)
    assert "JSON" in refused.json()["text"]
    assert act(operator, id, "resolve", result=json.dumps({"id": 7})).json()["changed"]
    assert guard.run("pay", key="k1", call=lambda: 1 / 0) == {"id": 7}


def test_a_record_that_has_changed_is_left_alone(operator: Asking, guard: Semel) -> None:
    id = doubt(guard, "k1")
    path = f"/records/shop/{id.hex()}/release"
    page = operator.get(path).text
    token = page.partition('name="token" value="')[2].partition('"')[0]
    guard.resolve("pay", "k1", "it did happen")  # somebody else was faster
    answer = operator.post(path, {"token": token, "form": operator.form()}, Accept="application/json")
    assert answer.status_code == 409
    assert "done now" in answer.json()["text"]
    assert guard.run("pay", key="k1", call=lambda: 1 / 0) == "it did happen"
    assert operator.get(path).status_code == 409


def test_force_takes_the_key_from_a_running_owner(operator: Asking, guard: Semel) -> None:
    id = claim(guard.store, "k1", 3600.0)
    assert operator.get(f"/records/shop/{id.hex()}/release").status_code == 409
    assert act(operator, id, "force").json()["changed"]
    assert found(guard, "k1") is None


def test_a_key_that_is_stored_as_a_hash_must_be_known(store: MemoryStore) -> None:
    with Semel(store, readable_keys=False, secret=b"s" * 32) as guard:
        guard.run("pay", key="k1", call=lambda: 1)
        record = found(guard, "k1")
        assert record is not None
        asking = Asking(Console({"shop": guard}, allow=lambda request: Access(act=True)))
        assert act(asking, record.id, "forget").json()["changed"] is False
        assert act(asking, record.id, "forget", key="k2").json()["changed"] is False
        assert found(guard, "k1") is not None
        assert act(asking, record.id, "forget", key="k1").json()["changed"]
        assert found(guard, "k1") is None
        asking.close()


# Messages


def dead(number: int) -> BuryMessage:
    message = Message(
        id=f"message-{number}", type="order.placed", source="/shop", time=1e9, data=b'{"card": "4111"}',
        content_type="application/json", destination="orders",
    )  # fmt: skip
    return BuryMessage("ledger", message, "the account is closed" if number % 2 else "no answer", 5)


@pytest.fixture(params=["sync", "async"])
def mail(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Asking]:
    path = tmp_path / "mail.db"
    migrate(path)
    with closing(SQLiteStore(path)) as store, Semel(store) as guard:
        for number in range(5):
            store.execute(dead(number))
        watched: Any = guard if request.param == "sync" else f"sqlite:///{path}"
        asking = Asking(Console({"mail": watched}, allow=lambda request: Access(act=True)))
        yield asking
        asking.close()


def test_dead_letters_are_redriven_one_or_all(mail: Asking, caplog: pytest.LogCaptureFixture) -> None:
    view = mail.get("/letters.json").json()
    assert view["count"] == 5
    assert [(cause["reason"], cause["count"]) for cause in view["causes"]] == [
        ("no answer", 3), ("the account is closed", 2),
    ]  # fmt: skip
    assert "message-0" not in mail.get("/letters").text, "ids are masked"
    position = view["letters"][0]["position"]
    letter = mail.get(f"/letter/mail/{position}.json").json()["letter"]
    assert letter["hidden"]
    assert "4111" not in mail.get(f"/letter/mail/{position}").text
    with caplog.at_level(logging.INFO, "semel.audit"):
        one = redrive(mail, f"position={position}")
        assert (one["changed"], mail.get("/letters.json").json()["count"]) == (True, 4)
        some = redrive(mail, "reason=closed")
        assert "2 dead letters were moved back" in some["text"]
        assert mail.get("/letters.json").json()["count"] == 2
        none = redrive(mail, "reason=closed", count="2")
        assert (none["changed"], "none fits" in none["text"]) == (False, True)
    assert [record.name for record in caplog.records].count("semel.audit") == 3
    outbox = mail.get("/outbox.json").json()["stores"][0]
    assert (outbox["messages"], outbox["dead"], outbox["relays"]) == (3, 2, 0)
    assert "No relay is running" in mail.get("/outbox").text


def test_an_act_on_letters_keeps_every_filter_of_the_page(mail: Asking) -> None:
    page = mail.get("/letters?destination=orders&reason=closed").text
    assert "/letters/purge?" in page
    link = page.partition("/letters/purge?")[2].partition('"')[0].replace("&amp;", "&")
    assert {"destination=orders", "reason=closed", "store=mail"} <= set(link.split("&"))
    assert 'name="destination" value="orders"' in mail.get(f"/letters/purge?{link}").text


def test_an_act_on_one_message_does_not_reach_the_others(mail: Asking) -> None:
    page = mail.get("/letters?message=message-1").text
    assert "1 dead letter," in page
    link = page.partition("/letters/redrive?")[2].partition('"')[0].replace("&amp;", "&")
    assert "1 dead letter was moved back" in redrive(mail, link)["text"]
    assert mail.get("/letters.json").json()["count"] == 4


def test_the_way_back_from_an_act_on_letters_keeps_the_filters(mail: Asking, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ways, "MOST_LETTERS", 1)  # so that the act is repeated for the rest
    back = "/letters?origin=ledger&amp;reason=closed&amp;store=mail"
    assert mail.get("/letters/redrive?origin=ledger&reason=closed").text.count(f'href="{back}"') == 2
    done = redrive(mail, "origin=ledger&reason=closed")
    assert "1 that fit are left" in done["text"]
    assert done["back"] == back.replace("&amp;", "&")


def test_dead_letters_are_counted_up_to_a_limit(mail: Asking, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched, "COUNTED", 3)
    assert mail.get("/letters.json").json()["count"] == 3
    assert len(mail.get("/letters.json").json()["letters"]) == 5
    assert mail.get("/outbox.json").json()["stores"][0]["dead"] == 3
    assert words.capped(3, 3) == "3 or more"
    assert words.capped(2, 3) == "2"


def redrive(mail: Asking, query: str, **fields: str) -> Any:
    page = mail.get(f"/letters/redrive?store=mail&{query}").text
    hidden = {}
    for part in page.split('<input type="hidden" name="')[1:]:
        name, _, rest = part.partition('" value="')
        hidden[name] = rest.partition('"')[0]
    return mail.post("/letters/redrive", {**hidden, **fields}, Accept="application/json").json()


def test_letters_are_deleted_after_a_question(mail: Asking) -> None:
    assert "deleted for good" in mail.get("/letters/purge?store=mail").text
    answer = mail.post("/letters/purge", {"store": "mail", "count": "5", "form": mail.form("/letters/purge")})
    assert "5 dead letters were deleted" in answer.text
    assert "No dead letters" in mail.get("/letters").text


# The window, several stores, and a store that is away


def test_the_window_is_sized_from_what_is_there(operator: Asking) -> None:
    view = operator.get("/window.json?qps=200&bytes=1kB&retry_budget=15m&broker_retention=7d").json()
    assert (view["recommended_seconds"], view["decided_by"]) == (185 * 3600, "broker retention")
    assert view["keys"] == 200 * 185 * 3600
    assert view["bytes"] == view["keys"] * 1000
    assert operator.get("/window.json?qps=1&window=1h&retry_budget=2h").json()["enough"] is False
    for query in ("qps=many", "qps=-1", "bytes=few", "window=soon"):
        assert operator.get(f"/window?{query}").status_code == 400


class Away(MemoryStore):
    """A store that does not answer."""

    def execute(self, op: Any) -> Any:
        raise StoreUnavailable("the store is away")


def test_a_store_that_is_away_hides_no_other(guard: Semel) -> None:
    guard.run("pay", key="a", call=lambda: 1)
    record = found(guard, "a")
    assert record is not None
    with Semel(Away(), sweep_every=None) as away:
        asking = Asking(Console({"away": away, "shop": guard}, allow=lambda request: Access()))
        view = until(asking, "/overview.json", lambda view: view["totals"]["asked"])
        assert [store["error"] for store in view["stores"]] == ["the store is away", None]
        page = asking.get("/").text
        assert "away does not answer" in page
        assert "not known in away" in page
        assert "the store is away" in asking.get("/stuck").text
        assert asking.get("/operations?store=away").status_code == 503
        assert asking.get("/operations?store=shop").status_code == 200
        story = asking.get(f"/records/shop/{record.id.hex()}")
        assert story.status_code == 200
        assert "away does not answer" in story.text
        form = asking.form("/operations?store=shop")
        answer = asking.post("/search", {"key": "a", "operation": "pay", "form": form})
        assert answer.headers["location"] == f"/records/shop/{record.id.hex()}"
        assert asking.post("/search", {"key": "b", "operation": "pay", "form": form}).status_code == 503
        asking.close()


class Unlisted(MemoryStore):
    """A store that cannot list its records, and keeps no history."""

    lists = False
    trails = False


@pytest.mark.parametrize("store", [Away(), Unlisted()])
def test_what_nobody_can_see_is_not_called_well(store: MemoryStore) -> None:
    with Semel(store, sweep_every=None) as guard:
        asking = Asking(Console({"shop": guard}, allow=lambda request: Access()))
        view = asking.get("/overview.json").json()
        assert (view["totals"]["in_doubt"], view["totals"]["stuck"], view["blind"]) == (None, None, ["shop"])
        page, stuck = asking.get("/").text, asking.get("/stuck").text
        assert page.count("not known in shop") == 2
        assert "as it should be" not in page
        assert ("No calls in the last hour" in page) == isinstance(store, Unlisted)
        assert "Nobody can tell whether" in stuck
        assert "Nothing is stuck" not in stuck
        asking.close()


def test_it_is_mounted_below_a_path(guard: Semel) -> None:
    from starlette.applications import Starlette
    from starlette.routing import Mount

    guard.run("pay", key="a", call=lambda: 1)
    console = Console(guard, allow=lambda request: Access())
    asking = Asking(Starlette(routes=[Mount("/semel", console)]))
    asking._console = console
    page = asking.get("/semel/").text
    assert 'href="/semel/operations"' in page
    assert asking.get("/semel/static/console.css").status_code == 200
    assert asking.get("/semel/operations.json").json()["records"][0]["state"] == State.DONE.name.lower()
    assert asking.get("/operations").status_code == 404
    asking.close()


@pytest.mark.slow
@pytest.mark.parametrize("package", ["jinja2", "markupsafe", "starlette"])
def test_it_says_what_to_install_when_a_package_is_missing(package: str) -> None:
    code = (
        f"import sys; sys.modules[{package!r}] = None\n"
        "from semel.errors import MissingDependency\n"
        "try:\n    import semel.console\n"
        "except MissingDependency as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "semel[console]" in done.stdout
