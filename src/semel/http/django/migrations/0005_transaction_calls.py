"""The two ends of the transactional mode as calls."""

from semel.http.django.schema import migration

Migration = migration(5, after="0004_inputs")
