"""Outbox, inbox and dead letters."""

from semel.http.django.schema import migration

Migration = migration(6, after="0005_transaction_calls")
