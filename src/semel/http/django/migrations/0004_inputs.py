"""The index of what resumable operations were called with."""

from semel.http.django.schema import migration

Migration = migration(4, after="0003_transactions")
