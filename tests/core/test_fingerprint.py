from __future__ import annotations

import dataclasses
import enum
import inspect
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semel.core.encoding.fingerprint import DIGEST_SIZE, Arguments
from semel.core.keys import identity
from semel.errors import PolicyError


def test_the_payload_is_no_part_of_the_identity() -> None:
    # Folded into the key, a changed body or a refreshed token would run the payment again.
    assert list(inspect.signature(identity).parameters) == ["tenant", "operation", "key", "hash"]


def test_an_empty_secret_is_a_policy_error() -> None:
    with pytest.raises(PolicyError, match="secret is empty"):
        Arguments(pay, secret=b"")


class Session:
    """A live object."""


class Colour(enum.IntEnum):
    RED = 1


@dataclasses.dataclass
class Order:
    id: int
    lines: list[Any] = dataclasses.field(default_factory=list)


def pay(order_id: Any, amount: Any = 5, currency: Any = "EUR") -> None: ...


def flexible(first: Any, /, second: Any = 2, *rest: Any, only: Any = None, **others: Any) -> None: ...


def of(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> bytes:
    return Arguments(function).digest(args, kwargs)


class TestArgumentsAuto:
    def test_its_bytes_never_change(self) -> None:
        assert of(pay, 17, 500, "USD").hex() == "a822f3348131b2b79a7ec271b018ce74"
        assert of(pay, {"b": [1.5, None], "a": {Decimal("1.0")}}).hex() == "d175f164fecadb8ad6da6e3e36e56237"

    def test_how_arguments_are_passed_does_not_matter(self) -> None:
        calls = [
            of(pay, 1, 7),
            of(pay, 1, amount=7),
            of(pay, order_id=1, amount=7),
            of(pay, amount=7, order_id=1),
            of(pay, 1, 7, "EUR"),
            of(pay, 1, currency="EUR", amount=7),
        ]
        assert set(calls) == {calls[0]}

    def test_every_changed_argument_is_another_call(self) -> None:
        calls = [
            of(pay, 1),
            of(pay, 2),
            of(pay, 1, 6),
            of(pay, 1, 5, "USD"),
            of(pay, 5, 1),
            of(pay, "1"),
            of(pay, None),
        ]
        assert len(set(calls)) == len(calls)

    @pytest.mark.parametrize(
        "values", [[1, 1.0, True, "1", b"1", Colour.RED, Decimal(1)], [None, 0, "", [], {}, False]]
    )
    def test_values_of_different_types_are_different_arguments(self, values: list[Any]) -> None:
        assert len({of(pay, value) for value in values}) == len(values)
        assert len({of(pay, {"a": [value]}) for value in values}) == len(values)

    def test_the_order_of_a_dict_does_not_matter_and_the_types_of_its_keys_do(self) -> None:
        assert of(pay, {"a": 1, "b": 2}) == of(pay, {"b": 2, "a": 1})
        assert of(pay, {1: "x"}) != of(pay, {"1": "x"})

    def test_a_live_object_is_left_out(self) -> None:
        def save(order: Any, session: Any, log: Any = None) -> None: ...

        calls = [of(save, 1, Session()), of(save, 1, Session(), print), of(save, 1, session=open, log=Session())]
        assert set(calls) == {calls[0]}
        assert of(save, 2, Session()) != calls[0]

    def test_what_is_live_inside_an_argument_does_not_hide_the_rest(self) -> None:
        def save(order: Any) -> None: ...

        assert of(save, {"amount": 1, "by": Session()}) == of(save, {"amount": 1, "by": Session()})
        assert of(save, {"amount": 1, "by": Session()}) != of(save, {"amount": 2, "by": Session()})
        assert of(save, Order(1, [Session()])) != of(save, Order(2, [Session()]))

    def test_the_object_of_a_method_is_left_out_even_if_it_is_data(self) -> None:
        @dataclasses.dataclass
        class Service:
            url: str

            def pay(self, amount: int) -> None: ...

        assert of(Service.pay, Service("a"), 5) == of(Service.pay, Service("b"), 5) == of(Service("c").pay, 5)
        assert of(Service.pay, Service("a"), 5) != of(Service.pay, Service("a"), 6)

    def test_an_argument_swapped_with_a_live_one_is_another_call(self) -> None:
        def two(a: Any, b: Any) -> None: ...

        assert of(two, 1, Session()) != of(two, Session(), 1)

    def test_a_parameter_added_with_a_default_makes_no_conflict(self) -> None:
        def before(order: Any, amount: Any = 5) -> None: ...

        def after(order: Any, amount: Any = 5, express: Any = False) -> None: ...

        assert of(before, 1, 7) == of(after, 1, 7) == of(after, 1, 7, express=False)
        assert of(after, 1, 7, express=True) != of(before, 1, 7)

    def test_rest_and_keywords_count(self) -> None:
        calls = [
            of(flexible, 1),
            of(flexible, 1, 3),
            of(flexible, 1, 2, 3),
            of(flexible, 1, 2, 3, 4),
            of(flexible, 1, 2, [3, 4]),
            of(flexible, 1, only=3),
            of(flexible, 1, extra=3),
            of(flexible, 1, first=3),
            of(flexible, 3),
            of(flexible, 1, rest=[3]),
        ]
        assert len(set(calls)) == len(calls)
        assert of(flexible, 1, a=1, b=2) == of(flexible, 1, b=2, a=1) == of(flexible, 1, 2, a=1, b=2, c=Session())

    @pytest.mark.parametrize(
        ("args", "kwargs", "words"),
        [
            ((), {}, "missing required argument: 'order_id'"),
            ((), {"amount": 1}, "missing required argument: 'order_id'"),
            ((1, 2, 3, 4), {}, "takes 3 positional arguments, got 4"),
            ((1,), {"order_id": 1}, "multiple values for argument 'order_id'"),
            ((1,), {"colour": 1}, "unexpected keyword argument 'colour'"),
        ],
    )
    def test_arguments_that_do_not_fit_are_a_type_error(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], words: str
    ) -> None:
        with pytest.raises(TypeError):
            pay(*args, **kwargs)
        with pytest.raises(TypeError, match=words):
            Arguments(pay).digest(args, kwargs)

    def test_a_function_that_does_not_tell_its_parameters_works_too(self) -> None:
        assert of(max, 1, 2) != of(max, 2, 1)
        assert of(max, 1, 2) == of(max, 1, 2)

    def test_a_signature_will_do_for_the_function(self) -> None:
        assert Arguments(inspect.signature(pay)).digest((1,), {}) == of(pay, 1)

    def test_any_text_is_an_argument(self) -> None:
        assert len({of(pay, text) for text in ("\ud800", "\udc80", "é", "\x00", "😀")}) == 5

    def test_what_contains_itself_is_a_clear_error(self) -> None:
        itself: list[Any] = []
        itself.append(itself)
        for choice in ("auto", "all", ("order_id",), lambda value: [value]):
            with pytest.raises(PolicyError, match="contains itself"):
                Arguments(pay, choice).digest((itself,), {})

    @given(st.integers() | st.text(max_size=3), st.integers(), st.sampled_from(["EUR", "USD"]))
    def test_both_ways_of_binding_agree(self, order_id: Any, amount: int, currency: str) -> None:
        by_position = of(pay, order_id, amount, currency)
        assert of(pay, order_id=order_id, amount=amount, currency=currency) == by_position
        assert of(pay, order_id, amount, currency=currency) == by_position

    def test_a_secret_makes_it_a_mac(self) -> None:
        secrets = [None, b"a", b"b", b"k" * 100]
        assert len({Arguments(pay, secret=secret).digest((1,), {}) for secret in secrets}) == len(secrets)


class TestArgumentsAll:
    def test_it_is_auto_for_plain_data(self) -> None:
        assert Arguments(pay, "all").digest((1, [2]), {}) == of(pay, 1, [2])

    @pytest.mark.parametrize("value", [Session(), [Session()], {"a": Session()}, Order(1, [Session()])])
    def test_an_argument_that_is_not_plain_data_is_an_error(self, value: Any) -> None:
        with pytest.raises(PolicyError, match=r"'amount' is or holds a Session.*exclude="):
            Arguments(pay, "all").digest((1, value), {})

    def test_errors_name_rest_and_keywords(self) -> None:
        with pytest.raises(PolicyError, match=r"'\*rest'"):
            Arguments(flexible, "all").digest((1, 2, Session()), {})
        with pytest.raises(PolicyError, match="'db'"):
            Arguments(flexible, "all").digest((1,), {"db": Session()})

    def test_a_live_default_is_no_error_until_it_is_passed(self) -> None:
        def save(order: Any, session: Any = Session) -> None: ...

        arguments = Arguments(save, "all")
        assert arguments.digest((1,), {}) != arguments.digest((2,), {})
        with pytest.raises(PolicyError, match="'session'"):
            arguments.digest((1, Session), {})


class TestArgumentsChosen:
    def test_only_the_chosen_count(self) -> None:
        arguments = Arguments(pay, ("order_id", "currency"))
        assert (
            arguments.digest((1, 2), {}) == arguments.digest((1, 3), {}) == arguments.digest((1, Session(), "EUR"), {})
        )
        assert arguments.digest((1, 2), {}) != arguments.digest((2, 2), {})
        assert arguments.digest((1, 2), {}) != arguments.digest((1, 2, "USD"), {})

    def test_the_order_of_the_names_does_not_matter(self) -> None:
        choices: list[Any] = [("order_id", "amount"), ["amount", "order_id"], {"amount", "order_id"}]
        assert len({Arguments(pay, choice).digest((1, 2), {}) for choice in choices}) == 1

    def test_paths_lead_through_objects_mappings_and_lists(self) -> None:
        def ship(order: Any) -> None: ...

        by_id = Arguments(ship, ("order.id",))
        assert by_id.digest((Order(1, [Session()]),), {}) == by_id.digest(({"id": 1, "x": 2},), {})
        assert by_id.digest((Order(1),), {}) != by_id.digest((Order(2),), {})
        by_sku = Arguments(ship, ("order.lines.*.sku",))
        one, other, longer = ([{"sku": "a", "n": 1}], [{"sku": "a", "n": 2}], [{"sku": "a"}, {"n": 1}])
        assert by_sku.digest((Order(1, one),), {}) == by_sku.digest((Order(2, other),), {})
        assert by_sku.digest((Order(1, one),), {}) != by_sku.digest((Order(1, longer),), {})

    def test_an_absent_field_is_not_none(self) -> None:
        def ship(order: Any) -> None: ...

        arguments = Arguments(ship, ("order.note",))
        values: list[Any] = [{}, {"note": None}, {"note": ""}]
        assert len({arguments.digest((value,), {}) for value in values}) == 3
        assert arguments.digest((None,), {}) == arguments.digest(({},), {})

    def test_rest_and_keywords_can_be_chosen(self) -> None:
        arguments = Arguments(flexible, ("rest", "extra", "others.more"))
        calls = [
            arguments.digest((1, 2), {}),
            arguments.digest((1, 2, 3), {}),
            arguments.digest((1, 2), {"extra": 1}),
            arguments.digest((1, 2), {"more": 1}),
        ]
        assert len(set(calls)) == 4
        assert arguments.digest((5, 6), {"other": 1}) == calls[0]

    def test_a_chosen_live_object_is_an_error(self) -> None:
        with pytest.raises(PolicyError, match="'amount' is or holds a Session"):
            Arguments(pay, ("amount",)).digest((1, Session()), {})

    @pytest.mark.parametrize("choice", [("amuont",), ("amount", "order.id")])
    def test_an_unknown_name_is_refused_when_compiled(self, choice: Any) -> None:
        with pytest.raises(PolicyError, match="it has order_id, amount, currency"):
            Arguments(pay, choice)

    @pytest.mark.parametrize(
        ("choice", "words"),
        [((), "names no argument"), ("amount", r"\('amount',\)"), (("a..b",), "not a path"), ((7,), "not a path")],
    )
    def test_other_wrong_choices_are_refused_when_compiled(self, choice: Any, words: str) -> None:
        with pytest.raises(PolicyError, match=words):
            Arguments(pay, choice)


class TestArgumentsOtherwise:
    def test_a_callable_says_what_counts(self) -> None:
        arguments = Arguments(pay, lambda order_id, amount=5, **_: {"amount": amount})
        assert arguments.digest((1, 2), {}) == arguments.digest((9,), {"amount": 2, "currency": "USD"})
        assert arguments.digest((1, 2), {}) != arguments.digest((1, 3), {})
        assert Arguments(pay, lambda *_: b"x").digest((1,), {}) != Arguments(pay, lambda *_: "x").digest((1,), {})
        assert len(Arguments(pay, lambda *_: None).digest((1,), {})) == DIGEST_SIZE

    def test_a_callable_must_return_plain_data(self) -> None:
        with pytest.raises(PolicyError, match="fingerprint function returned is or holds a Session"):
            Arguments(pay, lambda *_: [Session()]).digest((1,), {})

    def test_none_is_no_fingerprint(self) -> None:
        assert Arguments(pay, None).digest((1,), {}) == b""

    def test_without_leaves_parameters_out(self) -> None:
        arguments = Arguments(flexible, exclude=("second", "trace"))
        assert arguments.digest((1, 2), {}) == arguments.digest((1, 3), {"trace": "x"})
        assert arguments.digest((1, 2), {}) != arguments.digest((1, 2), {"other": "x"})
        plain = Arguments(flexible, exclude=("rest", "others"))
        assert plain.digest((1, 2), {}) == plain.digest((1, 2, 3, 4), {"a": 5})

    def test_all_without_the_live_ones(self) -> None:
        arguments = Arguments(pay, "all", exclude=["currency"])
        assert arguments.digest((1, 2, Session()), {}) == arguments.digest((1, 2), {})

    @pytest.mark.parametrize(
        ("choice", "without", "words"),
        [
            ("auto", ("amuont",), "no parameter 'amuont'"),
            ("auto", "amount", r"write \('amount',\)"),
            (("amount",), ("amount",), "both chosen and left out"),
            (None, ("amount",), "no meaning"),
            (print, ("amount",), "no meaning"),
        ],
    )
    def test_contradictions_are_refused_when_compiled(self, choice: Any, without: Any, words: str) -> None:
        with pytest.raises(PolicyError, match=words):
            Arguments(pay, choice, exclude=without)

    def test_a_function_without_parameters(self) -> None:
        def now() -> None: ...

        assert len(of(now)) == DIGEST_SIZE
        with pytest.raises(PolicyError, match="it has none"):
            Arguments(now, ("when",))

    def test_two_functions_keep_their_own_choices(self) -> None:
        strict, loose = Arguments(pay, "all"), Arguments(pay, ("order_id",))
        assert loose.digest((1, 2), {}) == loose.digest((1, 3), {})
        assert strict.digest((1, 2), {}) != strict.digest((1, 3), {})
