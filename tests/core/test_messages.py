"""How a message is written as headers."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from semel.core.messaging.messages import MAX_NAME, Message, attributes, check_message, fits_column, read_message
from semel.errors import ConfigurationError


@given(st.floats(-1e9, 4e9))
@example(1763300000.0)
@example(1763300000.9999999)
@example(1763300000.0000005)
@example(-0.5)
def test_the_time_is_written_as_datetime_writes_it(time: float) -> None:
    found = attributes(Message("m", "tested", b"", time=time)).get("ce-time")
    assert found == (datetime.fromtimestamp(time, UTC).isoformat().replace("+00:00", "Z") if time else None)


def test_what_is_empty_is_left_out_and_what_is_not_comes_back() -> None:
    bare = Message("m", "tested", b"", content_type="", headers={"empty": ""})
    assert attributes(bare) == {"ce-specversion": "1.0", "ce-id": "m", "ce-type": "tested", "ce-source": "/"}
    full = Message(
        "m", "tested", b"{}", "/shop", "orders", "order-1", 7, "receipt", "application/json", 1763300000.25,
        {"traceparent": "00-a-b-01"}, 2,
    )  # fmt: skip
    assert read_message(attributes(full), b"{}", "orders") == full


@given(st.lists(st.text("ab c\t\u00a0\u2003\x85\ud800", max_size=4) | st.just("x" * 200), min_size=5, max_size=5))
def test_a_message_is_refused_exactly_if_one_of_its_attributes_does_not_fit_a_column(texts: list[str]) -> None:
    source, destination, stream, subject, content_type = texts
    message = Message("m", "t", b"", source, destination, stream, 1, subject, content_type)
    try:
        check_message(message)
    except ConfigurationError:
        assert not all(map(fits_column, texts))
    else:
        assert all(map(fits_column, texts))


def test_the_longest_names_fit_together() -> None:
    longest = "x" * MAX_NAME
    check_message(Message(longest, longest, b"", longest, longest, longest, 1, longest, longest))


@pytest.mark.parametrize("name", ["id", "type", "destination", "stream", "subject", "source"])
def test_an_attribute_that_is_no_text_is_named_with_its_type(name: str) -> None:
    attributes_of: dict[str, Any] = {"id": "m-1", "type": "order.placed", "data": b"", name: None}
    with pytest.raises(ConfigurationError, match=f"the {name} of a message is text, not NoneType"):
        check_message(Message(**attributes_of))
