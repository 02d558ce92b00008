"""The Django app ``semel.http.django``: its migrations make the tables, and its checks look at the settings."""

from __future__ import annotations

from django.apps import AppConfig
from django.core.checks import register

from semel.http.django.checks import check_settings, check_views

__all__ = ["SemelConfig"]


class SemelConfig(AppConfig):  # type: ignore[misc]  # Django is not typed
    """Listed in INSTALLED_APPS as ``semel.http.django``."""

    name = "semel.http.django"
    label = "semel"
    verbose_name = "Semel"

    def ready(self) -> None:
        register(check_settings)
        register(check_views)
