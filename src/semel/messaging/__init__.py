"""Messages around a broker: the outbox, the relay, the inbox, and the dead letters."""

from semel.core.messaging.consuming import ConsumerReport
from semel.core.messaging.messages import Letter, LetterFilter, Message
from semel.messaging.aio_deadletters import AsyncDeadLetters
from semel.messaging.aio_inbox import AsyncConsumer, AsyncInbox
from semel.messaging.aio_outbox import AsyncOutbox
from semel.messaging.brokers.urls import open_broker, open_source
from semel.messaging.deadletters import DeadLetters
from semel.messaging.inbox import Consumer, Inbox
from semel.messaging.outbox import Outbox
from semel.messaging.relay import AsyncRelay, Relay

__all__ = [
    "AsyncConsumer",
    "AsyncDeadLetters",
    "AsyncInbox",
    "AsyncOutbox",
    "AsyncRelay",
    "Consumer",
    "ConsumerReport",
    "DeadLetters",
    "Inbox",
    "Letter",
    "LetterFilter",
    "Message",
    "Outbox",
    "Relay",
    "open_broker",
    "open_source",
]
