"""The two ends of the transactional mode."""

from semel.http.django.schema import migration

Migration = migration(3, after="0002_tenants")
