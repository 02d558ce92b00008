"""A hook for drf-spectacular, which makes the OpenAPI document of Django REST framework.

::

    SPECTACULAR_SETTINGS = {
        "POSTPROCESSING_HOOKS": [
            "drf_spectacular.hooks.postprocess_schema_enums",
            "semel.http.describe.drf.postprocess",
        ],
    }
"""

from __future__ import annotations

import re
from typing import Any

from semel.http.contract.routes import Endpoint
from semel.http.describe.openapi import document


def postprocess(result: dict[str, Any], generator: Any, **options: Any) -> dict[str, Any]:
    """Describe the project's declared views in the document."""
    from semel.http.django import endpoints
    from semel.http.django.handling import configuration

    config = configuration()
    listed = [_as_documented(each) for each in endpoints(generator.urlconf)]
    return document(result, listed, guard=config.guard, docs=config.docs, header=config.key_header.title)


def _as_documented(endpoint: Endpoint) -> Endpoint:
    """Return the endpoint with the path that drf-spectacular shows: its settings may remove or add a prefix."""
    from drf_spectacular.settings import spectacular_settings as shown

    path = endpoint.path
    if shown.SCHEMA_PATH_PREFIX_TRIM and shown.SCHEMA_PATH_PREFIX:
        path = re.sub("^" + shown.SCHEMA_PATH_PREFIX.removeprefix("^"), "", path, flags=re.IGNORECASE)
    path = (shown.SCHEMA_PATH_PREFIX_INSERT or "") + path
    if not path.startswith("/"):
        path = f"/{path}"
    return Endpoint(endpoint.method, path, endpoint.rule, endpoint.name)
