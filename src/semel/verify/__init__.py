"""Checks of services: the audit of an OpenAPI document, and the doctor of a live configuration."""
