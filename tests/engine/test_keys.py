"""Keys, tenants and fingerprints of calls: where they come from, and what is refused before anything is claimed."""

import dataclasses
import uuid
from typing import Any

import pytest

from semel import KeyFormat, KeyInvalid, KeyMissing, KeyReused, PolicyError
from tests.engine.driving import Engine


@dataclasses.dataclass
class Order:
    id: str
    lines: Any = ()


@pytest.mark.parametrize(
    ("key", "error"),
    [
        (None, KeyMissing),
        ("", KeyMissing),
        (True, KeyInvalid),
        (False, KeyInvalid),
        ([1], KeyInvalid),
        ({"a": 1}, KeyInvalid),
        (1.5, KeyInvalid),
        (b"bytes", KeyInvalid),
        ("x" * 10_000, KeyInvalid),
        ("a\x00b", KeyInvalid),
        ("   ", KeyInvalid),
        (object(), KeyInvalid),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_a_wrong_key_is_refused_and_nothing_is_claimed(quick_engine: Engine, key: Any, error: Any) -> None:
    engine = quick_engine
    ran: list[int] = []

    def body(key: Any) -> None:
        ran.append(1)

    with pytest.raises(error):
        engine.do(engine.once(body), key)
    with pytest.raises(error):
        engine.run(lambda: ran.append(1), key=key)
    assert engine.script.ops == []
    assert ran == []


@pytest.mark.parametrize("key", ["text", 7, uuid.UUID(int=5), "ключ", "x" * 255], ids=repr)
def test_text_numbers_and_uuids_are_keys(quick_engine: Engine, key: Any) -> None:
    assert quick_engine.run(lambda: 1, key=key) == 1
    assert quick_engine.record(str(key)) is not None


def test_a_key_of_another_format_is_refused(quick_engine: Engine) -> None:
    def body(key: Any) -> int:
        return 1

    for key_format in ("uuid", KeyFormat.named("uuid")):
        ship = quick_engine.once(body, key_format=key_format)
        with pytest.raises(KeyInvalid):
            quick_engine.do(ship, "not-a-uuid")
        assert quick_engine.do(ship, uuid.uuid4()) == 1
    with pytest.raises(PolicyError, match="unknown key format"):
        quick_engine.once(body, key_format="guid")


def order_first(order: Order, carrier: str = "mail", *, note: str = "") -> str:
    return order.id


def keyword_only(*, order: Order, carrier: str = "mail") -> str:
    return order.id


def with_default(carrier: str = "mail", order_id: str = "7") -> str:
    return order_id


def many(*args: Any, **kwargs: Any) -> str:
    return "many"


O7 = Order("7")


@pytest.mark.parametrize(
    ("function", "selector", "args", "kwargs"),
    [
        (order_first, "order.id", (O7,), {}),
        (order_first, "order.id", (), {"order": O7}),
        (order_first, lambda order: order.id, (O7, "ship"), {}),
        (order_first, lambda order: order.id, (), {"carrier": "ship", "order": O7}),
        (order_first, lambda o: o.id, (O7,), {}),
        (order_first, lambda o: o.id, (), {"order": O7}),
        (order_first, lambda carrier, order: order.id, (O7,), {}),
        (order_first, lambda o, c: o.id, (O7, "ship"), {}),
        (order_first, lambda order, note: note or order.id, (O7,), {}),
        (keyword_only, "order.id", (), {"order": O7}),
        (keyword_only, lambda order: order.id, (), {"order": O7}),
        (with_default, "order_id", (), {}),
        (with_default, "order_id", ("ship",), {}),
        (with_default, "order_id", ("ship", "7"), {}),
        (with_default, lambda order_id: order_id, (), {"carrier": "x"}),
        (order_first, lambda *args, **kwargs: args[0].id, (O7,), {}),
        (many, lambda *args, **kwargs: kwargs["id"], (1, 2), {"id": 7}),
    ],
)
def test_where_a_key_may_come_from(quick_engine: Engine, function: Any, selector: Any, args: Any, kwargs: Any) -> None:
    engine = quick_engine
    ship = engine.once(function, key=selector)
    engine.do(ship, *args, **kwargs)
    assert engine.record("7") is not None


EVENT: dict[str, Any] = {"Records": [{"id": "r-1"}, {"id": "r-2"}], "detail": {"order": Order("nested")}}


@pytest.mark.parametrize(
    ("path", "key"),
    [
        ("event.Records[0].id", "r-1"),
        ("event.Records[-1].id", "r-2"),
        ("event.Records[1].id", "r-2"),
        ("event.detail.order.id", "nested"),
    ],
)
def test_a_path_may_have_indexes(quick_engine: Engine, path: str, key: str) -> None:
    quick_engine.do(quick_engine.once(lambda event: None, key=path, fingerprint=("event.Records[0].id",)), EVENT)
    assert quick_engine.record(key) is not None


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("event.details.id", r"op: key='event.details.id' leads nowhere: event \(dict\) has no 'details'"),
        ("event.Records[5].id", r"op: key='event.Records\[5\].id' leads nowhere: event.Records \(list\) has no \[5\]"),
        ("event.detail[0].id", r"event.detail \(dict\) has no \[0\]"),
        ("event.detail.order.number", r"event.detail.order \(Order\) has no 'number'"),
        ("event.Records.id", r"event.Records \(list\) has no 'id'"),
    ],
)
def test_a_path_that_leads_nowhere_is_an_error_of_ours_and_nothing_is_claimed(
    quick_engine: Engine, path: str, message: str
) -> None:
    with pytest.raises(KeyMissing, match=message):
        quick_engine.do(quick_engine.once(lambda event: None, key=path), EVENT)
    with pytest.raises(PolicyError, match=message.replace("key=", "tenant=")):
        quick_engine.do(quick_engine.once(lambda event: None, key=lambda event: "k", tenant=path), EVENT)
    assert quick_engine.script.kinds == []


@pytest.mark.parametrize(
    "path", ["event.", "event..id", "event.a[0", "event.a[x]", "event.a[]", "event[0]id", "event.[0]"]
)
def test_what_is_no_path_is_refused_when_it_is_declared(quick_engine: Engine, path: str) -> None:
    with pytest.raises(PolicyError, match="not a path"):
        quick_engine.once(lambda event: None, key=path)
    with pytest.raises(PolicyError, match="not a path"):
        quick_engine.once(lambda event: None, key=lambda event: "k", fingerprint=(path,))


def test_a_path_walks_through_mappings_and_attributes(quick_engine: Engine) -> None:
    def body(request: Any) -> None:
        return None

    quick_engine.do(quick_engine.once(body, key="request.order.id"), {"order": Order("nested")})
    assert quick_engine.record("nested") is not None


@pytest.mark.parametrize(
    ("selector", "words"),
    [
        ("orderid", "names no parameter; there are: order, carrier, note"),
        ("id.order", "names no parameter"),
        (lambda order, nope: 1, "asks for nope"),
        (lambda a, b, c, d: 1, "takes 4 arguments"),
        (7, "not 7"),
        (None, "not None"),
    ],
)
def test_a_selector_that_cannot_work_is_refused_when_decorating(
    quick_engine: Engine, selector: Any, words: str
) -> None:
    with pytest.raises(PolicyError, match=words):
        quick_engine.once(order_first, key=selector)


def test_a_function_without_parameters_has_no_key(quick_engine: Engine) -> None:
    def body() -> None:
        return None

    with pytest.raises(PolicyError, match="there are: none"):
        quick_engine.once(body, key="key")


def test_missing_arguments_are_the_callers_mistake_and_claim_nothing(quick_engine: Engine) -> None:
    ship = quick_engine.once(order_first, key="order.id")
    with pytest.raises(TypeError):
        quick_engine.do(ship)
    with pytest.raises(TypeError):
        quick_engine.do(ship, O7, surprise=1)
    assert quick_engine.script.ops == []


def test_a_selector_that_raises_claims_nothing(quick_engine: Engine) -> None:
    ship = quick_engine.once(order_first, key=lambda order: order.nope)
    with pytest.raises(AttributeError):
        quick_engine.do(ship, O7)
    assert quick_engine.script.ops == []


# -- whose it is


def test_equal_keys_of_two_tenants_or_two_operations_never_meet(engine: Engine) -> None:
    def body(key: str, who: str) -> str:
        return who

    pay = engine.once(body, operation="pay", tenant="who")
    refund = engine.once(body, operation="refund", tenant="who")
    assert engine.do(pay, "k", "alice") == "alice"
    assert engine.do(pay, "k", "bob") == "bob"
    assert engine.do(refund, "k", "alice") == "alice"
    assert engine.script.kinds == ["Claim", "Complete"] * 3
    assert engine.record("k", "pay", "alice") is not None
    assert engine.record("k", "pay", "bob") is not None


def test_a_tenant_may_be_a_parameter_or_a_function(quick_engine: Engine) -> None:
    engine = quick_engine

    def body(key: str, who: Any = "alice") -> None:
        return None

    for selector, who, expected in (
        ("who", "bob", "bob"),
        (lambda who: who.upper(), "bob", "BOB"),
        (lambda key, who: who, 7, "7"),
    ):
        engine.do(engine.once(body, tenant=selector, operation="t"), "k", who)
        assert engine.record("k", "t", expected) is not None


def test_a_misspelt_tenant_is_not_taken_for_the_tenant_itself(quick_engine: Engine) -> None:
    """Else all callers would share it, and Bob would get Alice's answer."""

    def body(key: str, account: str) -> None:
        return None

    with pytest.raises(PolicyError, match="acount"):
        quick_engine.once(body, tenant="acount")


def test_a_tenant_that_is_none_is_an_error_and_claims_nothing(quick_engine: Engine) -> None:
    def body(key: str, who: Any) -> None:
        return None

    ship = quick_engine.once(body, tenant="who")
    with pytest.raises(PolicyError, match="None"):
        quick_engine.do(ship, "k", None)
    assert quick_engine.script.ops == []


def test_the_guards_tenant_is_the_default(quick_engine: Engine) -> None:
    engine = quick_engine
    guard = engine.new_guard(tenant="acme")
    engine.run(lambda: 1, guard=guard)
    engine.run(lambda: 2, guard=guard, tenant="other")
    assert engine.record(tenant="acme") is not None
    assert engine.record(tenant="other") is not None
    assert engine.record(tenant="") is None


@pytest.mark.parametrize("tenant", [7, b"acme", ["acme"]], ids=repr)
def test_a_tenant_that_is_no_text_gets_a_clear_word(quick_engine: Engine, tenant: Any) -> None:
    """Either it is taken as text, as a selector's value is, or it is refused by a Semel error."""
    from semel import SemelError

    try:
        quick_engine.run(lambda: 1, tenant=tenant)
    except SemelError:
        assert quick_engine.script.ops == []
    else:
        assert quick_engine.record(tenant=str(tenant)) is not None


def test_keys_may_be_kept_as_hashes_only(engine: Engine) -> None:
    guard = engine.new_guard(readable_keys=False)
    assert engine.run(lambda: 1, guard=guard) == 1
    record = engine.record()
    assert record is not None
    assert record.key is None
    assert engine.run(lambda: 2, guard=guard) == 1
    kept = engine.new_guard()
    engine.run(lambda: 1, guard=kept, key="readable")
    readable = engine.record("readable")
    assert readable is not None
    assert (readable.key, readable.operation) == ("readable", "op")


# -- the same request


def test_another_request_under_the_same_key_is_refused_and_the_record_untouched(engine: Engine) -> None:
    def body(key: str, amount: int, note: str = "") -> int:
        return amount

    pay = engine.once(body)
    assert engine.do(pay, "k", 1) == 1
    before = engine.record()
    with pytest.raises(KeyReused):
        engine.do(pay, "k", 2)
    with pytest.raises(KeyReused):
        engine.do(pay, "k", 1, note="x")
    assert engine.record() == before
    assert engine.do(pay, key="k", amount=1, note="") == 1
    assert engine.names()[-3:] == ["mismatched", "mismatched", "replayed"]


def test_an_abandoned_attempt_of_another_request_is_not_taken_over(engine: Engine) -> None:
    engine.abandon(fingerprint=b"f" * 16)
    before = engine.record()
    with pytest.raises(KeyReused):
        engine.run(lambda: 1, fingerprint="mine")
    assert engine.record() == before


def test_arguments_that_may_differ_are_left_out(engine: Engine) -> None:
    def body(key: str, amount: int, trace: str) -> int:
        return amount

    pay = engine.once(body, exclude=("trace",))
    assert engine.do(pay, "k", 1, "a") == 1
    assert engine.do(pay, "k", 1, "b") == 1
    with pytest.raises(KeyReused):
        engine.do(pay, "k", 2, "a")
    loose = engine.once(body, operation="loose", fingerprint=None)
    assert engine.do(loose, "k", 1, "a") == 1
    assert engine.do(loose, "k", 2, "b") == 1
    chosen = engine.once(body, operation="chosen", fingerprint=("amount",))
    assert engine.do(chosen, "k", 1, "a") == 1
    assert engine.do(chosen, "k", 1, "b") == 1
    with pytest.raises(KeyReused):
        engine.do(chosen, "k", 2, "a")


def test_the_order_of_a_dict_does_not_make_another_request(engine: Engine) -> None:
    def body(key: str, order: dict[str, Any]) -> str:
        return "ok"

    pay = engine.once(body)
    assert engine.do(pay, "k", {"a": 1, "b": {"c": 2, "d": 3}}) == "ok"
    assert engine.do(pay, "k", {"b": {"d": 3, "c": 2}, "a": 1}) == "ok"


def test_wrong_names_in_a_fingerprint_are_refused_when_decorating(quick_engine: Engine) -> None:
    for settings in ({"exclude": ("nope",)}, {"fingerprint": ("nope",)}, {"exclude": "order"}, {"fingerprint": "some"}):
        with pytest.raises(PolicyError):
            quick_engine.once(order_first, key="order.id", **settings)


def test_a_secret_changes_the_fingerprint(quick_engine: Engine) -> None:
    engine = quick_engine
    engine.run(lambda: 1, fingerprint="x", guard=engine.new_guard(secret=b"s"))
    with pytest.raises(KeyReused):
        engine.run(lambda: 1, fingerprint="x")


def test_a_fingerprint_that_is_not_plain_data_is_refused_and_claims_nothing(quick_engine: Engine) -> None:
    with pytest.raises(PolicyError):
        quick_engine.run(lambda: 1, fingerprint=object())
    assert quick_engine.script.ops == []


@pytest.mark.parametrize(
    ("settings", "differ", "advice"),
    [
        ({}, "at, note, *rest, **others", 'exclude=("at",)'),
        ({"exclude": ("note", "rest", "others")}, "at", 'exclude=("at",)'),
        ({"key": lambda key: key, "exclude": ("rest", "others")}, "key, at, note", 'exclude=("at",)'),
        ({"fingerprint": ("at", "note")}, "at, note", "leave it out of fingerprint="),
        (
            {"fingerprint": lambda key, at, *args, **kwargs: at},
            "what the fingerprint= function returns",
            "fingerprint=",
        ),
    ],
    ids=["key", "exclude", "derived key", "chosen", "function"],
)
def test_a_reused_key_names_the_arguments_that_may_differ_and_never_a_value(
    quick_engine: Engine, settings: Any, differ: str, advice: str
) -> None:
    def body(key: str, at: str, note: str = "", *rest: str, **others: str) -> None:
        return None

    ship = quick_engine.once(body, **settings)
    quick_engine.do(ship, "k", "at noon", session=object())
    with pytest.raises(KeyReused) as caught:
        quick_engine.do(ship, "k", "an hour later")
    message = str(caught.value)
    assert message.startswith(f"op[k]: this key was used before, and not with the same arguments. Compared: {differ}. ")
    assert advice in message
    assert "noon" not in message
    assert "later" not in message


def test_a_reused_key_of_the_call_form_names_its_fingerprint(quick_engine: Engine) -> None:
    quick_engine.run(lambda: 1, fingerprint={"at": "noon"})
    with pytest.raises(
        KeyReused, match=r"not with the same data\. Compared: what is passed as fingerprint=\."
    ) as caught:
        quick_engine.run(lambda: 1, fingerprint={"at": "later"})
    assert "noon" not in str(caught.value)
