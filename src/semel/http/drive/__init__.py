"""Shells for the flows of ``semel.http.contract.endpoint``, and the endpoints that run in them."""
