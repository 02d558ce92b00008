"""Messages with a random id are not in the index of ids."""

from semel.http.django.schema import migration

Migration = migration(10, after="0009_inbox_by_time")
