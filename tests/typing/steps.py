"""The types of steps as a program uses them: checked by mypy, never run."""

from __future__ import annotations

from typing import assert_type
from uuid import UUID, uuid4

from semel import AsyncOperation, Operation


def reserve(item: str) -> int:
    return 1


def put_back(number: int) -> None: ...


async def charge(cents: int) -> UUID:
    return uuid4()


async def refund(receipt: UUID) -> None: ...


def work(op: Operation) -> None:
    assert_type(op.step("reserve", reserve, "pen"), int)
    assert_type(op.step("reserve", reserve, item="pen", undo=put_back), int)
    assert_type(op.step("reserve", reserve, "pen", connection=object()), int)
    number = op.step("count", lambda: 3)
    assert_type(number, int)


async def work_async(op: AsyncOperation) -> None:
    receipt = await op.step("charge", charge, 5)
    assert_type(receipt, UUID)
    assert_type(await op.step("charge", charge, 5, undo=refund), UUID)
    assert_type(await op.step("reserve", reserve, "pen", undo=put_back), int)
    typed: UUID = await op.step("charge", charge, 5)
    assert_type(typed, UUID)
