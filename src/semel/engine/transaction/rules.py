"""The rules of the transactional mode that do not wait: how often a unit of work runs, and where its connection is."""

from __future__ import annotations

import inspect
from typing import Final

from semel.core.call import Call
from semel.core.policy import at_least_one
from semel.engine.declare.declaration import Declaration, Pick, Selector, select
from semel.engine.operation import running
from semel.errors import InProgress, PolicyError

TRIES: Final = 10
"""How often a unit of work runs at most in transactions that Semel opens; it runs again only after a conflict."""


def check_tries(own: bool, tries: int | None) -> int:
    """Return how often the unit of work may run. Raises PolicyError for an impossible number."""
    if tries is None:
        return TRIES
    if not own:
        raise PolicyError("tries= is for own_transaction=True: a transaction of yours can only be run again by you")
    return at_least_one(tries, "tries")


def refuse_nesting(call: Call) -> None:
    """Raise InProgress if the call is made by its own handler: it would wait for itself."""
    outer = running.get()
    if outer is not None and outer.id == call.id:
        raise InProgress(f"{call} is called within itself", retry_after=1.0)


def connection_parameter(connection: Selector) -> tuple[str, ...]:
    """The name of the parameter that holds the connection, if it is one: it is no part of the request."""
    return (connection,) if isinstance(connection, str) and "." not in connection else ()


def pick_connection(declared: Declaration, connection: Selector) -> Pick:
    """Return a function that gets the connection from a call's arguments."""
    if declared.inputs is not None:
        raise PolicyError(
            f"{declared.operation}: a transaction that died leaves nothing to resume: resumable= is for once()"
        )
    signature = inspect.signature(declared.function)
    parameters = [p for name, p in signature.parameters.items() if name != declared.handle]
    return select("connection", connection, signature.replace(parameters=parameters), declared.operation)
