"""Checks of services from outside: the audit of an OpenAPI document."""
