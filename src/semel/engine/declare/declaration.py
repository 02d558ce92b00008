"""What a decorated function declares, compiled once: its operation name, where its key comes from, what its result is.

Everything that can be wrong is found here, when the decorator runs, not at the first call.
"""

from __future__ import annotations

import inspect
import sys
import typing
import warnings
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from pathlib import PurePath
from typing import Any, ParamSpec, Protocol, TypeAlias, TypeVar, overload

from semel.core.encoding.fingerprint import Arguments
from semel.core.encoding.serializers import Serializer, serializer_for
from semel.core.keys import KeyFormat, check_name
from semel.core.policy import Policy
from semel.engine.declare.inputs import Inputs
from semel.engine.operation.operation import AsyncOperation, Operation, OperationHandle
from semel.errors import PolicyError

__all__ = [
    "AsyncOnce", "Declaration", "Selector", "handle_of", "handle_parameter", "refuse_generators",
    "select",
]  # fmt: skip

P = ParamSpec("P")
T = TypeVar("T")
Selector: TypeAlias = str | Callable[..., Any]
Pick: TypeAlias = Callable[[tuple[Any, ...], Mapping[str, Any]], Any]


class AsyncOnce(Protocol):
    """What ``AsyncSemel.once`` returns: an ``async def`` keeps its type, a plain ``def`` becomes awaitable."""

    @overload
    def __call__(self, function: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, Coroutine[Any, Any, T]]: ...

    @overload
    def __call__(self, function: Callable[P, T]) -> Callable[P, Coroutine[Any, Any, T]]: ...


class Declaration:
    """One protected function."""

    __slots__ = (
        "_place",
        "_warned",
        "awaits",
        "fingerprint",
        "function",
        "handle",
        "inputs",
        "key",
        "key_format",
        "operation",
        "policy",
        "recover",
        "serializer",
        "tenant",
    )

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        operation: str | None,
        key: Selector,
        tenant: Selector | None,
        fingerprint: Any,
        exclude: tuple[str, ...],
        key_format: KeyFormat | str,
        serializer: Serializer | None,
        policy: Policy,
        secret: bytes | None,
        awaited: bool,
    ) -> None:
        refuse_generators(function)
        signature = inspect.signature(function)
        hints = _hints(function)
        self.function = function
        self._warned = False
        self.awaits = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            getattr(function, "__call__", None)  # noqa: B004 - an object whose call is an async def
        )
        self.operation = check_name("an operation", _name_of(function) if operation is None else operation)
        self.handle = handle_parameter(hints)
        if self.handle is not None:
            _check_handle(self, hints[self.handle], awaited)
        given, self._place = _without_handle(signature, self.handle)
        self.key = select("key", key, given)
        self.tenant = None if tenant is None else select("tenant", tenant, given)
        self.key_format = key_format if isinstance(key_format, KeyFormat) else KeyFormat.named(key_format)
        self.fingerprint = Arguments(
            given, fingerprint, exclude=exclude, secret=secret, name=getattr(function, "__qualname__", None)
        )
        self.serializer = serializer_for(hints.get("return", inspect.Signature.empty), serializer)
        self.policy = policy
        self.recover = None if policy.recover is None else select("recover", policy.recover, given)
        self.inputs = Inputs(self.operation, given, hints) if policy.resumable else None

    def digest(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bytes:
        """The fingerprint of a call; the handle is no part of the request."""
        digest = self.fingerprint.digest(args, self._given(kwargs))
        if self.fingerprint.ignored and not self._warned:
            self._warn()
        return digest

    def input(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bytes | None:
        """The call's arguments, where they are to be kept."""
        return None if self.inputs is None else self.inputs.encode(args, self._given(kwargs))

    def _given(self, kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
        if self.handle is None or self.handle not in kwargs:
            return kwargs
        return {name: value for name, value in kwargs.items() if name != self.handle}

    def _warn(self) -> None:
        """Once: an argument that is not compared is one whose change would be swallowed."""
        self._warned = True
        names = ", ".join(f"{name} ({cls.__name__})" for name, cls in self.fingerprint.ignored.items())
        first = next(iter(self.fingerprint.ignored))
        warnings.warn(
            f"{self.operation}: {names} is no plain data, so another one under the same key would not be noticed. "
            f'Say what counts, fingerprint=("{first}.id", …), or that it does not, exclude=("{first}",)',
            stacklevel=6,
        )

    def invoke(self, op: OperationHandle, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the function, its handle filled in unless the caller gave one."""
        if self.handle is None or kwargs.get(self.handle) is not None:
            return self.function(*args, **kwargs)
        if self._place is not None and self._place < len(args):
            return self.function(*args[: self._place], op, *args[self._place :], **kwargs)
        return self.function(*args, **{**kwargs, self.handle: op})


def _name_of(function: Callable[..., Any]) -> str:
    """The name that scopes a function's keys. It must tell this function from every other."""
    name = getattr(function, "__qualname__", "")
    if not name or name.endswith("<lambda>"):
        raise PolicyError("a lambda has no name of its own, and keys are kept by name: pass operation=")
    return f"{_module_of(function)}.{name}"


def _module_of(function: Callable[..., Any]) -> str:
    """The module's name as other processes know it: only the program that was started calls itself ``__main__``."""
    name = function.__module__
    if name not in ("__main__", "__mp_main__"):
        return name
    module = sys.modules.get(name)
    spec = getattr(module, "__spec__", None)
    if spec is not None and spec.name not in ("__main__", "__mp_main__"):
        return str(spec.name.removesuffix(".__main__"))
    file = getattr(module, "__file__", None)
    return PurePath(file).stem if file else "__main__"


def refuse_generators(function: Callable[..., Any]) -> None:
    """A generator's body runs after its call has returned, so there is nothing to remember."""
    if not callable(function):
        raise PolicyError(f"once() decorates a function, not {function!r}")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise PolicyError(
            f"{getattr(function, '__qualname__', function)} is a generator: its body runs after the call has returned, "
            "so its outcome cannot be remembered. Protect the function that consumes it, or return a list"
        )


def select(what: str, selector: Selector, signature: inspect.Signature) -> Pick:
    """How to get ``what`` from a call's arguments: a parameter's name or path, or a function of some of them.

    A function's parameters are matched by name (``lambda order: order.id`` on ``ship(order, carrier)``); when none of
    its names is known, by position.
    """
    names = [name for name, p in signature.parameters.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if isinstance(selector, str):
        head, *path = selector.split(".")
        if head in names:
            return _path(_argument(signature, head), path)
        raise PolicyError(f"{what}={selector!r} names no parameter; there are: {', '.join(names) or 'none'}")
    if not callable(selector):
        raise PolicyError(f"{what}= is a parameter's name or a function of the arguments, not {selector!r}")
    wanted = _parameter_names(selector)
    if wanted is None:
        return lambda args, kwargs: selector(*args, **kwargs)
    unknown = [name for name in wanted if name not in names]
    if unknown and len(unknown) < len(wanted):
        raise PolicyError(f"{what}= asks for {', '.join(unknown)}; the parameters are: {', '.join(names) or 'none'}")
    if unknown:
        own = names[1:] if names and names[0] in ("self", "cls") else names
        if len(wanted) > len(own):
            raise PolicyError(f"{what}= takes {len(wanted)} arguments; the parameters are: {', '.join(own) or 'none'}")
        wanted = own[: len(wanted)]
    return _application(selector, signature, names, wanted)


def _application(
    selector: Callable[..., Any], signature: inspect.Signature, names: list[str], wanted: list[str]
) -> Pick:
    picks = [_argument(signature, name) for name in wanted]
    leading = wanted == names[: len(wanted)]
    count = len(wanted)

    def apply(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if leading and len(args) >= count:
            return selector(*args[:count])
        return selector(*[pick(args, kwargs) for pick in picks])

    return apply


def _argument(signature: inspect.Signature, name: str) -> Pick:
    parameters = list(signature.parameters.values())
    position = next(i for i, p in enumerate(parameters) if p.name == name)
    parameter = parameters[position]
    positional = parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    default = parameter.default

    def pick(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if positional and position < len(args):
            return args[position]
        if name in kwargs:
            return kwargs[name]
        if default is parameter.empty:
            raise TypeError(f"missing a required argument: {name!r}")
        return default

    return pick


def _path(pick: Pick, path: list[str]) -> Pick:
    if not path:
        return pick

    def walk(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        value = pick(args, kwargs)
        for name in path:
            value = value[name] if isinstance(value, Mapping) else getattr(value, name)
        return value

    return walk


def _without_handle(signature: inspect.Signature, handle: str | None) -> tuple[inspect.Signature, int | None]:
    """The parameters that callers fill in; and where the handle stands among those that are passed by position."""
    if handle is None:
        return signature, None
    parameters = list(signature.parameters.values())
    position = next(i for i, p in enumerate(parameters) if p.name == handle)
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    # A default of the handle's must not stand before parameters without one, so it is not among those left.
    left = signature.replace(parameters=[p for p in parameters if p.name != handle])
    return left, position if parameters[position].kind in kinds else None


def _parameter_names(selector: Callable[..., Any]) -> list[str] | None:
    """The names a selector asks for; None where it takes anything, or will not say."""
    try:
        parameters = inspect.signature(selector).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters):
        return None
    return [p.name for p in parameters if p.default is p.empty]


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    target = function.func if isinstance(function, partial) else function
    try:
        return typing.get_type_hints(target, include_extras=True)
    except (NameError, TypeError, AttributeError):
        # Names that exist for the type checker only: take the annotations that are no texts as they are.
        return {k: v for k, v in getattr(target, "__annotations__", {}).items() if not isinstance(v, str)}


def handle_parameter(hints: Mapping[str, Any]) -> str | None:
    for name, hint in hints.items():
        candidates = typing.get_args(hint) or (hint,)
        if name != "return" and any(isinstance(c, type) and issubclass(c, OperationHandle) for c in candidates):
            return name
    return None


def handle_of(function: Callable[..., Any]) -> str | None:
    """The parameter that is annotated as the handle's."""
    return handle_parameter(_hints(function))


def _check_handle(declared: Declaration, hint: Any, awaited: bool) -> None:
    """A handle is awaited or it is not: under the other's name a type checker would let ``op.step()`` go unawaited."""
    wanted = AsyncOperation if awaited or declared.awaits else Operation
    candidates = typing.get_args(hint) or (hint,)
    if any(isinstance(c, type) and issubclass(c, OperationHandle) and issubclass(wanted, c) for c in candidates):
        return
    why = "the function and its guard are sync"
    if declared.awaits:
        why = "in an async def its capture() and step() are awaited"
    elif awaited:
        why = "under AsyncSemel its capture() and step() are awaited; make the function an async def to use them"
    raise PolicyError(f"{declared.operation}: annotate {declared.handle} with {wanted.__name__}: {why}")
