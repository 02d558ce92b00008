"""The web console: what was asked, what ran, what was absorbed, what is in doubt, and the ways out.

``semel console URL`` serves it, or an ASGI application mounts it: ``app.mount("/semel", Console(guard, token=…))``.
"""

from semel.console.app import Console
from semel.console.gate import Access

__all__ = ["Access", "Console"]
