"""Functions that divide the inbox by time."""

from semel.http.django.schema import migration

Migration = migration(9, after="0008_log")
