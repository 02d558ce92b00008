"""Messages around a broker: the outbox, the relay, the inbox, and the dead letters."""

from semel.core.messages import Letter, LetterFilter, Message
from semel.messaging.aio_deadletters import AsyncDeadLetters
from semel.messaging.aio_inbox import AsyncInbox
from semel.messaging.brokers.urls import open_broker
from semel.messaging.deadletters import DeadLetters
from semel.messaging.inbox import Inbox
from semel.messaging.relay import AsyncRelay, Relay

__all__ = [
    "AsyncDeadLetters",
    "AsyncInbox",
    "AsyncRelay",
    "DeadLetters",
    "Inbox",
    "Letter",
    "LetterFilter",
    "Message",
    "Relay",
    "open_broker",
]
