"""The model that stands for records in the admin. It has no table of its own: ``admin.py`` asks the guard."""

from __future__ import annotations

from django.db import models


class IdempotencyRecord(models.Model):  # type: ignore[misc]  # Django is not typed
    """A record of the guard, for permissions and for the log of the admin."""

    id = models.CharField(primary_key=True, max_length=32)

    class Meta:
        managed = False
        default_permissions = ("view", "change")
        verbose_name = "idempotency record"

    def __str__(self) -> str:
        return str(self.id)
