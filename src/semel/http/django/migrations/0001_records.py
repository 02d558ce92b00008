"""Records and their steps."""

from semel.http.django.schema import migration

Migration = migration(1)
