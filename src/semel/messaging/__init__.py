"""Messages around a broker: the outbox, the relay, the inbox, and the dead letters."""

from semel.messaging.aio_outbox import AsyncOutbox
from semel.messaging.outbox import Outbox

__all__ = ["AsyncOutbox", "Outbox"]
