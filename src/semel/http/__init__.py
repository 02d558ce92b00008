"""The HTTP contract: pure code for every framework, and thin adapters for ASGI and WSGI."""
