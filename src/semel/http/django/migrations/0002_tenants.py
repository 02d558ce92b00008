"""A tenant's records, for quotas."""

from semel.http.django.schema import migration

Migration = migration(2, after="0001_records")
