"""The history of events."""

from semel.http.django.schema import migration

Migration = migration(7, after="0006_messages")
