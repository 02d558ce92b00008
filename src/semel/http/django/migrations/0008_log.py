"""The log of messages."""

from semel.http.django.schema import migration

Migration = migration(8, after="0007_trail")
