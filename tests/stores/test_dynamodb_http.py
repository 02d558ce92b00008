"""Writes that go with the answer, over HTTP: in async and plain endpoints, and what an error answer keeps of them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import flask
import httpx
import pytest
from fastapi import FastAPI
from fastapi.responses import JSONResponse

from semel import AsyncDynamoDBStore, AsyncOperation, AsyncSemel, DynamoDBStore, Operation, Semel
from semel.http import fastapi as on_fastapi
from semel.http import flask as on_flask
from semel.stores.dynamodb import migrate
from semel.stores.dynamodb.settings import DynamoDBSettings
from tests.servers import DynamoDBServer

pytestmark = pytest.mark.server


class Shelf:
    """Books by name, how many there are: one is taken on condition that there is one."""

    def __init__(self, server: DynamoDBServer) -> None:
        import boto3

        self.url = server.table()
        migrate(self.url)
        settings = DynamoDBSettings(self.url, 5, 5, 5, None)
        self.client = boto3.client(**settings.client())
        self.name = f"{settings.table}_books"
        self.client.create_table(
            TableName=self.name,
            AttributeDefinitions=[{"AttributeName": "id", "AttributeType": "S"}],
            KeySchema=[{"AttributeName": "id", "KeyType": "HASH"}],
            BillingMode="PAY_PER_REQUEST",
        )
        for book in ("a", "b", "c"):
            self.client.put_item(TableName=self.name, Item={"id": {"S": book}, "left": {"N": "1"}})

    def one_less(self, book: str) -> dict[str, Any]:
        return {
            "Update": {
                "TableName": self.name,
                "Key": {"id": {"S": book}},
                "UpdateExpression": "ADD #left :less",
                "ConditionExpression": "#left > :none",
                "ExpressionAttributeNames": {"#left": "left"},
                "ExpressionAttributeValues": {":less": {"N": "-1"}, ":none": {"N": "0"}},
            }
        }

    def left(self, book: str) -> int:
        found = self.client.get_item(TableName=self.name, Key={"id": {"S": book}}, ConsistentRead=True)
        return int(found["Item"]["left"]["N"])


@pytest.fixture
def shelf(dynamodb: DynamoDBServer) -> Iterator[Shelf]:
    shelf = Shelf(dynamodb)
    yield shelf
    shelf.client.close()


def fastapi_app(shelf: Shelf) -> FastAPI:
    app = FastAPI()

    @app.post("/buy/{book}", status_code=201)
    @on_fastapi.idempotent()
    async def buy(book: str, op: AsyncOperation) -> dict[str, str]:
        op.write(shelf.one_less(book))
        return {"bought": book}

    @app.post("/plain/{book}", status_code=201)
    @on_fastapi.idempotent()
    def plain(book: str, op: Operation) -> dict[str, str]:
        op.write(shelf.one_less(book))
        return {"bought": book}

    @app.post("/refuse/{book}")
    @on_fastapi.idempotent()
    async def refuse(book: str, op: AsyncOperation) -> JSONResponse:
        op.write(shelf.one_less(book))
        return JSONResponse({"no": book}, 422)

    @app.post("/fail/{book}")
    @on_fastapi.idempotent()
    async def fail(book: str, op: AsyncOperation) -> JSONResponse:
        op.write(shelf.one_less(book))
        return JSONResponse({"no": book}, 503)

    return app


def flask_app(shelf: Shelf) -> flask.Flask:
    app = flask.Flask("books")

    @app.post("/buy/<book>")
    @on_flask.idempotent()
    def buy(book: str, op: Operation) -> tuple[dict[str, str], int]:
        op.write(shelf.one_less(book))
        return {"bought": book}, 201

    @app.post("/refuse/<book>")
    @on_flask.idempotent()
    def refuse(book: str, op: Operation) -> tuple[dict[str, str], int]:
        op.write(shelf.one_less(book))
        return {"no": book}, 422

    return app


def asked(shelf: Shelf, kind: str, *asks: tuple[str, str]) -> list[httpx.Response]:
    """Answers to these paths, each with its key."""

    async def main() -> list[httpx.Response]:
        async with AsyncSemel(AsyncDynamoDBStore(shelf.url), sweep_every=None) as guard:
            app = fastapi_app(shelf)
            on_fastapi.install(app, guard=guard, tenant=lambda request: "shop")
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://shop") as client:
                return [await client.post(path, headers={"Idempotency-Key": key}) for path, key in asks]

    if kind == "fastapi":
        return asyncio.run(main())
    with Semel(DynamoDBStore(shelf.url), sweep_every=None) as guard:
        app = flask_app(shelf)
        on_flask.install(app, guard=guard, tenant=lambda request: "shop")
        with httpx.Client(transport=httpx.WSGITransport(app), base_url="http://shop") as client:
            return [client.post(path, headers={"Idempotency-Key": key}) for path, key in asks]


@pytest.mark.parametrize(
    ("kind", "path"),
    [("fastapi", "/buy/a"), ("fastapi", "/plain/a"), ("flask", "/buy/a")],
    ids=["async", "def", "wsgi"],
)
def test_the_write_and_the_answer_are_kept_together_and_a_condition_answers_409(
    shelf: Shelf, kind: str, path: str
) -> None:
    first, retry, other, again = asked(shelf, kind, (path, "k-1"), (path, "k-1"), (path, "k-2"), (path, "k-2"))
    assert (first.status_code, first.json()) == (201, {"bought": "a"})
    assert (retry.status_code, retry.headers["Idempotent-Replayed"]) == (201, "true")
    for answer in (other, again):  # there is none left, and the key stays free
        assert (answer.status_code, answer.headers["content-type"]) == (409, "application/problem+json")
        assert (answer.json()["code"], answer.json()["retryable"]) == ("idempotency_condition_failed", False)
        assert shelf.name not in answer.text, "clients learn nothing of tables"
    assert shelf.left("a") == 0


@pytest.mark.parametrize(
    ("kind", "path", "status", "replayed"),
    [("fastapi", "/refuse/b", 422, "true"), ("fastapi", "/fail/b", 503, None), ("flask", "/refuse/b", 422, "true")],
)
def test_an_error_answer_makes_no_writes(shelf: Shelf, kind: str, path: str, status: int, replayed: str | None) -> None:
    answers = asked(shelf, kind, (path, "k-1"), (path, "k-1"))
    assert [answer.status_code for answer in answers] == [status] * 2
    assert answers[1].headers.get("Idempotent-Replayed") == replayed
    assert shelf.left("b") == 1
