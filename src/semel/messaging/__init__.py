"""Messages around a broker: the outbox, the relay, the inbox, and the dead letters."""

from semel.messaging.aio_inbox import AsyncInbox
from semel.messaging.inbox import Inbox

__all__ = ["AsyncInbox", "Inbox"]
