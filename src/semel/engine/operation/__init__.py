"""The handle of a running operation, sync and async, and the keys that it sends to the next hop."""

from semel.engine.operation.aio import AsyncOperation
from semel.engine.operation.handle import INJECTED, OperationHandle, current_operation, running
from semel.engine.operation.sync import Operation

__all__ = ["INJECTED", "AsyncOperation", "Operation", "OperationHandle", "current_operation", "running"]
