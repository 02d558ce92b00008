"""Messages around a broker: the outbox, the relay, the inbox, and the dead letters."""

from semel.messaging.aio_inbox import AsyncInbox
from semel.messaging.aio_outbox import AsyncOutbox
from semel.messaging.inbox import Inbox
from semel.messaging.outbox import Outbox

__all__ = ["AsyncInbox", "AsyncOutbox", "Inbox", "Outbox"]
