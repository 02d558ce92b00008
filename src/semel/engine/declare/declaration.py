"""What a decorated function declares: the name of its operation, where its key comes from, how its result is stored.

Mistakes raise PolicyError when the decorator runs, not at the first call.
"""

from __future__ import annotations

import inspect
import sys
import typing
import warnings
from collections.abc import Callable, Coroutine, Mapping
from functools import partial, wraps
from inspect import BoundArguments, Signature
from pathlib import PurePath
from typing import Any, Final, ParamSpec, Protocol, TypeAlias, TypeVar, cast, overload

from semel.core.encoding.canonical import split_path
from semel.core.encoding.fingerprint import Arguments
from semel.core.encoding.plain import PLAIN
from semel.core.encoding.serializers import Serializer, decode_result, serializer_for
from semel.core.encoding.snapshot import NotSerializable
from semel.core.keys import KeyFormat, check_name
from semel.core.policy import Policy
from semel.engine.operation import AsyncOperation, Operation, OperationHandle
from semel.errors import KeyMissing, PolicyError, SemelError, SnapshotUnreadable

P = ParamSpec("P")
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
Selector: TypeAlias = str | Callable[..., Any]
Pick: TypeAlias = Callable[[tuple[Any, ...], Mapping[str, Any]], Any]
VARIABLE: Final = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
"""The kinds of ``*args`` and ``**kwargs``."""
POSITIONAL: Final = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
"""The kinds of parameters that can be passed by position."""


class Once(Protocol):
    """What ``Semel.once`` returns: the function keeps its type."""

    def __call__(self, function: Callable[P, T]) -> Callable[P, T]: ...


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
        "comparison",
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
        call_signature, self._place = _without_handle(signature, self.handle)
        self.key = select("key", key, call_signature, self.operation)
        self.tenant = None if tenant is None else select("tenant", tenant, call_signature, self.operation)
        self.key_format = key_format if isinstance(key_format, KeyFormat) else KeyFormat.named(key_format)
        self.fingerprint = Arguments(
            call_signature, fingerprint, exclude=exclude, secret=secret, name=getattr(function, "__qualname__", None)
        )
        self.comparison = self.fingerprint.describe(key)
        self.serializer = serializer_for(hints.get("return", Signature.empty), serializer)
        self.policy = policy
        self.recover = (
            None if policy.recover is None else select("recover", policy.recover, call_signature, self.operation)
        )
        self.inputs = Inputs(self.operation, call_signature, hints) if policy.resumable else None

    def digest(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bytes:
        """Return the fingerprint of a call. The handle is not part of the request."""
        digest = self.fingerprint.digest(args, self._without_handle(kwargs))
        if self.fingerprint.ignored and not self._warned:
            self._warn()
        return digest

    def input(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bytes | None:
        """Return the call's arguments as bytes if the function is resumable, otherwise None."""
        return None if self.inputs is None else self.inputs.encode(args, self._without_handle(kwargs))

    def _without_handle(self, kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
        if self.handle is None or self.handle not in kwargs:
            return kwargs
        return {name: value for name, value in kwargs.items() if name != self.handle}

    def _warn(self) -> None:
        """Warn once: if an argument that is not compared changes, nobody notices."""
        self._warned = True
        names = ", ".join(f"{name} ({cls.__name__})" for name, cls in self.fingerprint.ignored.items())
        first = next(iter(self.fingerprint.ignored))
        warnings.warn(
            f"{self.operation}: {names} is not plain data, so another one under the same key would not be noticed. "
            f'Say what counts, fingerprint=("{first}.id", …), or that it does not, exclude=("{first}",)',
            stacklevel=6,
        )

    def invoke(self, op: OperationHandle, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the function and pass it the handle, unless the caller has passed one."""
        if self.handle is None or kwargs.get(self.handle) is not None:
            return self.function(*args, **kwargs)
        if self._place is not None and self._place < len(args):
            return self.function(*args[: self._place], op, *args[self._place :], **kwargs)
        return self.function(*args, **{**kwargs, self.handle: op})


class Inputs:
    """The arguments of a resumable function as bytes. They are stored, so that it can be run without its caller.

    Arguments are plain data or what their annotations name (a dataclass, an Enum, a model), like results. Nothing is
    unpickled. The handle is not an argument: each attempt gets its own.
    """

    __slots__ = ("_operation", "_serializers", "_signature")

    def __init__(self, operation: str, signature: Signature, hints: Mapping[str, Any]) -> None:
        self._operation = operation
        self._signature = signature
        self._serializers: dict[str, Serializer] = {
            name: PLAIN if p.kind in VARIABLE else serializer_for(hints.get(name, Signature.empty))
            for name, p in signature.parameters.items()
        }

    def encode(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bytes:
        """Raises PolicyError for an argument that cannot be stored; nothing is claimed then."""
        bound = self._signature.bind(*args, **kwargs)
        return PLAIN.encode({name: self._text(name, value) for name, value in bound.arguments.items()})

    def _text(self, name: str, value: Any) -> str:
        try:
            return self._serializers[name].encode(value).decode()
        except NotSerializable as error:
            raise PolicyError(
                f"{self._operation} is resumable, so its arguments are stored, and {name} "
                f"({type(value).__name__}) cannot be: {error}"
            ) from error

    def decode(self, payload: bytes) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments. Raises SnapshotUnreadable if the function takes others now."""
        stored: dict[str, str] = PLAIN.decode(payload)
        unknown = [name for name in stored if name not in self._serializers]
        if unknown:
            raise SnapshotUnreadable(
                f"{self._operation} was called with {', '.join(unknown)}, which it no longer takes"
            )
        values = {
            name: decode_result(serializer, serializer.name, stored[name].encode())
            for name, serializer in self._serializers.items()
            if name in stored
        }
        bound = BoundArguments(self._signature, values)
        try:
            self._signature.bind(*bound.args, **bound.kwargs)
        except TypeError as error:
            raise SnapshotUnreadable(f"{self._operation} takes other arguments now than it was called with") from error
        return bound.args, bound.kwargs


def requires_brackets(method: F) -> F:
    """For a guard's method that returns a decorator: raise PolicyError if it is used as one itself, ``@guard.once``."""
    parameters = inspect.signature(method).parameters.values()
    needed = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty]

    @wraps(method)
    def make(self: Any, *args: Any, **settings: Any) -> Any:
        if not args and all(name in settings for name in needed):
            return method(self, **settings)
        first = _first_parameter(args[0] if args else None)
        shown = ", ".join(f'{name}="{"session" if name == "connection" else first}"' for name in needed)
        raise PolicyError(
            f"@guard.{method.__name__} needs its settings in brackets, by name, at least what the key is: "
            f"write @guard.{method.__name__}({shown})"
        )

    return cast("F", make)


def _first_parameter(function: object) -> str:
    code = getattr(function, "__code__", None)
    names = code.co_varnames[: code.co_argcount] if code is not None else ()
    return next((name for name in names if name not in ("self", "cls")), "order_id")


def _name_of(function: Callable[..., Any]) -> str:
    """The name that scopes a function's keys. No other function may have it."""
    name = getattr(function, "__qualname__", "")
    if not name or name.endswith("<lambda>"):
        raise PolicyError("a lambda has no name of its own, and keys are kept by name: pass operation=")
    return f"{_module_of(function)}.{name}"


def _module_of(function: Callable[..., Any]) -> str:
    """The module's name as other processes import it: ``__main__`` is only its name in the program that was started."""
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
    """Raise PolicyError for a generator: its body runs after the call has returned, so there is no result to store."""
    if not callable(function):
        raise PolicyError(f"once() decorates a function, not {function!r}")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise PolicyError(
            f"{getattr(function, '__qualname__', function)} is a generator: its body runs after the call has returned, "
            "so its outcome cannot be stored. Protect the function that consumes it, or return a list"
        )


def select(what: str, selector: Selector, signature: Signature, operation: str) -> Pick:
    """Return a function that gets ``what`` from a call's arguments.

    :param selector: a parameter's name or path, or a function of some of the arguments. The function's parameters are
        matched by name (``lambda order: order.id`` for ``ship(order, carrier)``), or by position if no name matches.
    """
    names = [name for name, p in signature.parameters.items() if p.kind not in VARIABLE]
    if isinstance(selector, str):
        path = split_path(selector)
        if path[0] not in names:
            raise PolicyError(f"{what}={selector!r} names no parameter; there are: {', '.join(names) or 'none'}")
        refusal = KeyMissing if what == "key" else PolicyError
        return _path(signature, path, refusal, f"{operation}: {what}={selector!r}")
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


def _application(selector: Callable[..., Any], signature: Signature, names: list[str], wanted: list[str]) -> Pick:
    picks = [_argument(signature, name) for name in wanted]
    leading = wanted == names[: len(wanted)]
    count = len(wanted)

    def apply(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if leading and len(args) >= count:
            return selector(*args[:count])
        return selector(*[pick(args, kwargs) for pick in picks])

    return apply


def _argument(signature: Signature, name: str) -> Pick:
    parameter, position = signature.parameters[name], list(signature.parameters).index(name)
    positional, default = parameter.kind in POSITIONAL, parameter.default

    def pick(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if positional and position < len(args):
            return args[position]
        if name in kwargs:
            return kwargs[name]
        if default is parameter.empty:
            raise TypeError(f"missing a required argument: {name!r}")
        return default

    return pick


def _path(signature: Signature, path: list[str | int], refusal: type[SemelError], setting: str) -> Pick:
    """Return a function that follows a path: it begins with an argument, and goes on to what is below that.

    :param refusal: raised if the path leads nowhere.
    """
    pick = _argument(signature, str(path[0]))
    if len(path) == 1:
        return pick

    def walk(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        value = pick(args, kwargs)
        for at, segment in enumerate(path[1:], 1):
            try:
                if isinstance(segment, str) and not isinstance(value, Mapping):
                    value = getattr(value, segment)
                else:
                    value = value[segment]
            except (LookupError, TypeError, AttributeError) as error:
                before = "".join(f".{each}" if isinstance(each, str) else f"[{each}]" for each in path[:at])
                missing = repr(segment) if isinstance(segment, str) else f"[{segment}]"
                raise refusal(
                    f"{setting} leads nowhere: {before[1:]} ({type(value).__name__}) has no {missing}"
                ) from error
        return value

    return walk


def _without_handle(signature: Signature, handle: str | None) -> tuple[Signature, int | None]:
    """The parameters that callers fill in, and the position of the handle if it can be passed by position."""
    if handle is None:
        return signature, None
    # The handle may have a default and stand before parameters without one: without it the signature stays valid.
    left = signature.replace(parameters=[p for name, p in signature.parameters.items() if name != handle])
    positional = signature.parameters[handle].kind in POSITIONAL
    return left, list(signature.parameters).index(handle) if positional else None


def _parameter_names(selector: Callable[..., Any]) -> list[str] | None:
    """The names of a selector's parameters; None if it takes any, or if they are not known."""
    try:
        parameters = inspect.signature(selector).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(p.kind in VARIABLE for p in parameters):
        return None
    return [p.name for p in parameters if p.default is p.empty]


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    target = function.func if isinstance(function, partial) else function
    try:
        return typing.get_type_hints(target, include_extras=True)
    except (NameError, TypeError, AttributeError):
        # Some names exist only for the type checker: use the annotations that are not strings.
        return {k: v for k, v in getattr(target, "__annotations__", {}).items() if not isinstance(v, str)}


def handle_parameter(hints: Mapping[str, Any]) -> str | None:
    return next((name for name, hint in hints.items() if name != "return" and _handles_in(hint)), None)


def _handles_in(hint: Any) -> list[type[OperationHandle]]:
    """The classes of handles that an annotation names, as itself or in a union."""
    candidates = typing.get_args(hint) or (hint,)
    return [c for c in candidates if isinstance(c, type) and issubclass(c, OperationHandle)]


def handle_of(function: Callable[..., Any]) -> str | None:
    """The name of the parameter that is annotated as the handle, or None."""
    return handle_parameter(_hints(function))


def _check_handle(declared: Declaration, hint: Any, awaited: bool) -> None:
    """Raise PolicyError for the wrong kind of handle: a type checker would not see a missing await of ``op.step()``."""
    wanted = AsyncOperation if awaited or declared.awaits else Operation
    if any(issubclass(wanted, handle) for handle in _handles_in(hint)):
        return
    why = "the function and its guard are sync"
    if declared.awaits:
        why = "in an async def its capture() and step() are awaited"
    elif awaited:
        why = "under AsyncSemel its capture() and step() are awaited; make the function an async def to use them"
    raise PolicyError(f"{declared.operation}: annotate {declared.handle} with {wanted.__name__}: {why}")
