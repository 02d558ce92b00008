"""Litestar's generated document, with what is declared in it: a hook for the plugin's ``on_app_init``.

Litestar makes its document as an object, from its ``OpenAPIConfig``, and turns that into plain data wherever it is
shown or written to a file. That last step is the one we stand in.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from semel.engine.guard import Guard
from semel.http.describe.openapi import document
from semel.http.describe.paths import Declared

if TYPE_CHECKING:
    from litestar import Litestar
    from litestar.config.app import AppConfig
    from litestar.openapi.spec import OpenAPI

__all__ = ["document_litestar"]


def document_litestar(
    app_config: AppConfig, endpoints: Callable[[Litestar], Declared], guard: Guard, docs: str | None = None
) -> None:
    """Have the application's OpenAPI document say what is declared.

    :param endpoints: lists those of an application; asked when the document is made, by when all routes are there.
    """
    if app_config.openapi_config is None:
        return
    config = copy.copy(app_config.openapi_config)  # the default one is shared by all applications
    make = config.to_openapi_schema

    def to_openapi_schema() -> OpenAPI:
        openapi = make()
        plain = openapi.to_schema

        def to_schema() -> dict[str, Any]:
            return document(plain(), endpoints(_application(app_config)), guard=guard, docs=docs)

        openapi.to_schema = to_schema  # type: ignore[method-assign]
        return openapi

    config.to_openapi_schema = to_openapi_schema  # type: ignore[method-assign]
    app_config.openapi_config = config


def _application(app_config: AppConfig) -> Litestar:
    """The application that is made of this configuration, as Litestar's own plugin for OpenAPI knows it."""
    for plugin in app_config.plugins:
        if hasattr(plugin, "provide_openapi_schema"):
            return cast("Litestar", getattr(plugin, "app"))  # noqa: B009 - of a class that Litestar keeps to itself
    raise LookupError("Litestar has no plugin for OpenAPI")
