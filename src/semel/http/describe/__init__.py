"""Descriptions of a service: its OpenAPI document, and the section on idempotency of its design."""

from semel.http.describe.openapi import document, rules_by_operation

__all__ = ["document", "rules_by_operation"]
