"""Natural idempotency: changes that a repeat does not make again. For async connections: ``semel.natural.aio``."""

from semel.natural.programs import Applied, Change, Inserted
from semel.natural.sync import append_event, compare_and_set, delete, insert_once, transition, upsert

__all__ = [
    "Applied", "Change", "Inserted", "append_event", "compare_and_set", "delete", "insert_once", "transition", "upsert",
]  # fmt: skip
