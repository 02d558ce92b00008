"""A Django project in one file: payments that happen once, even if they are requested many times.

``python examples/django/shop.py`` sends one payment twice; ``python examples/django/shop.py runserver`` serves it;
``migrate`` creates the tables.
"""

import sys
import uuid

import django
from django.conf import settings
from django.core.management import execute_from_command_line
from django.http import JsonResponse
from django.urls import path
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_POST

from semel import Operation, Semel, SQLiteStore

settings.configure(
    DEBUG=True,
    SECRET_KEY="not for production",
    ALLOWED_HOSTS=["*"],
    ROOT_URLCONF=__name__,
    INSTALLED_APPS=["semel.http.django"],
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": "shop.db"}},
    MIDDLEWARE=["django.middleware.common.CommonMiddleware", "semel.http.django.IdempotencyMiddleware"],
    SEMEL={
        "GUARD": lambda: Semel(SQLiteStore("shop.db", migrate=False)),
        "TENANT": lambda request: request.headers.get("X-Customer", "anyone"),  # a real shop uses its authentication
    },
)
django.setup()

from semel.http.django import idempotent  # noqa: E402 (after the settings, as in any Django project)


@csrf_exempt
@require_POST
@idempotent(ttl="24h")
def pay(request, op: Operation):
    payment = op.capture("payment", lambda: str(uuid.uuid4()))
    print(f"charging once for {op.key}, as {payment}")
    return JsonResponse({"payment": payment}, status=201)


urlpatterns = [path("payments", pay)]


def try_it() -> None:
    from django.test import Client

    execute_from_command_line(["shop.py", "migrate", "--verbosity=0"])
    client, key = Client(), {"Idempotency-Key": str(uuid.uuid4())}
    for amount in (10, 10, 20):
        answer = client.post("/payments", {"amount": amount}, content_type="application/json", headers=key)
        how = "replayed" if "Idempotent-Replayed" in answer.headers else "new"
        print(answer.status_code, how, answer.content.decode())


if __name__ == "__main__":
    if len(sys.argv) > 1:
        execute_from_command_line(sys.argv)
    else:
        try_it()
