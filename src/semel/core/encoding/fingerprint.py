"""The fingerprint of a function call: 16 bytes that show whether a repeated key came with the same arguments.

A fingerprint is compared and never looked up. It is not an identity: two equal orders under two keys are two orders.
16 bytes are enough. A client that finds two requests with one fingerprint can only fool itself, under its own key; to
match another client's request by chance or by search takes 2**128 tries.

With a secret the fingerprint is a MAC. Without one, whoever reads the records can guess an argument that has few
possible values, such as an amount or a postcode, by hashing them all. HTTP requests are hashed in ``semel.http``; this
module must not know HTTP, keys, records or stores.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from hashlib import blake2b
from typing import Any, Literal

from semel.core.encoding.canonical import ABSENT, LIVE, LiveObject, encode_value, split_path
from semel.errors import PolicyError

DIGEST_SIZE = 16

Choice = Literal["auto", "all"] | Iterable[str] | Callable[..., Any] | None
"""Which arguments count: see Arguments."""


def hash_key(secret: bytes | None) -> bytes:
    """Return a key for BLAKE2b from a secret of any length; an empty one for None. Raises PolicyError."""
    if secret is None:
        return b""
    if not secret:
        raise PolicyError("the fingerprint's secret is empty: leave it out, or give a secret")
    return secret if len(secret) <= 64 else blake2b(secret, person=b"semel.secret.1").digest()


class Arguments:
    """Computes the fingerprints of a function's calls. It is created once for the function.

    ``choice`` says which arguments count:

    - ``"auto"``: every argument that is plain data (see ``encode_value``). A live object, such as a session, is
      ignored, and so is ``self``. A live object inside a list or a dataclass counts as a blank.
    - ``"all"``: the same, but an argument that is not plain data is an error.
    - names or paths, ``("amount", "order.id")``: only these. They must be plain data.
    - a callable: it gets the call's arguments and returns what counts, as plain data or bytes.
    - None: no fingerprint; the digest is ``b""``.

    Arguments are matched to parameters, so that ``f(1, 2)`` and ``f(a=1, b=2)`` are the same call. An argument that
    equals its parameter's default counts as omitted, so that a new parameter with a default does not turn the retries
    that are under way into conflicts.

    :param exclude: parameters that do not count.
    :param name: the function's name for errors, if only its signature is given.
    """

    __slots__ = ("_calls", "_columns", "_excluded", "_extract", "_hash", "_paths", "_strict", "ignored")

    def __init__(
        self,
        function: Callable[..., Any] | inspect.Signature,
        choice: Choice = "auto",
        *,
        exclude: Iterable[str] = (),
        secret: bytes | None = None,
        name: str | None = None,
    ) -> None:
        self._hash = blake2b(digest_size=DIGEST_SIZE, key=hash_key(secret), person=b"semel.args.1")
        self.ignored: dict[str, type] = {}
        """Arguments that were ignored in calls so far, because they are not plain data, with their types."""
        self._calls = _Calls(function, name)
        self._extract = choice if callable(choice) else None
        self._strict = choice != "auto"
        self._paths: tuple[_Path, ...] | None = None
        self._columns: tuple[_Column | None, ...] | None = None
        if isinstance(exclude, str):
            raise PolicyError(f"exclude takes a list of parameters: write ({exclude!r},)")
        self._excluded = excluded = frozenset(exclude)
        for parameter in sorted(excluded):
            self._calls.check_name(parameter)
        if choice is None or callable(choice):
            if excluded:
                raise PolicyError("exclude= has no meaning here: the choice leaves no arguments to name")
        elif isinstance(choice, str):
            if choice not in ("auto", "all"):
                raise PolicyError(f"unknown choice {choice!r}: 'auto', 'all', or a list of parameters: ({choice!r},)")
            self._columns = tuple(map(self._column, self._calls.parameters))
        else:
            self._paths = self._compile(choice, excluded)

    def describe(self, key: object = None) -> str:
        """Return what is compared, by name, for the error that says that it differs. It never shows a value.

        :param key: the parameter that is the key. It is left out: it cannot differ.
        """
        advice = "If an argument may differ between retries, such as a clock or a trace id, "
        if self._paths is not None:
            names, advice = [path for path, _, _ in self._paths], advice + "leave it out of fingerprint="
        elif self._columns is not None:
            names = [column[0] for column in self._columns if column is not None and column[0] != key]
            example = next(
                (name for name in names if name != self._calls.parameters[0].name), names[0] if names else ""
            )
            advice += f'leave it out: exclude=("{example}",)'
            variable = (("*", self._calls.rest), ("**", self._calls.keywords))
            names += [star + name for star, name in variable if name and name not in self._excluded]
        else:
            names, advice = ["what the fingerprint= function returns"], advice + "leave it out there"
        return f"the same arguments. Compared: {', '.join(names)}. {advice}"

    def digest(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bytes:
        """Return the fingerprint of one call: 16 bytes, or none if the choice is None.

        Raises TypeError for arguments that the function does not take, as the call itself would, and PolicyError for an
        argument that must be plain data and is not.
        """
        if self._columns is not None:
            text = self._all_of(self._columns, args, kwargs)
        elif self._paths is not None:
            text = self._some_of(self._paths, args, kwargs)
        elif self._extract is not None:
            text = _encode(self._extract(*args, **kwargs), "what the fingerprint function returned")
        else:
            return b""
        digest = self._hash.copy()
        # Arguments may be any text, even one that is not valid UTF-8, such as a file name.
        digest.update(text.encode("utf-8", "surrogatepass"))
        return digest.digest()

    def _all_of(self, columns: tuple[_Column | None, ...], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
        calls, strict = self._calls, self._strict
        found: list[str] = []
        extra: tuple[Any, ...] = ()
        others: dict[str, Any] = {}
        values: Iterable[Any] = args
        if kwargs or not calls.least <= len(args) <= calls.most:
            bound, extra, others = calls.bind(args, kwargs)
            values = [bound.get(name, ABSENT) for name in calls.names]
        name = ""
        try:
            for column, value in zip(columns, values, strict=False):
                if column is None or value is ABSENT:
                    continue
                name, label, default = column
                text = encode_value(value, strict)
                if text == LIVE:
                    self.ignored.setdefault(name, type(value))
                elif text != default:
                    found.append(label + text)
            if extra and calls.rest not in self._excluded:
                name = f"*{calls.rest}"
                found.append("+" + encode_value(extra, strict))
            if others and calls.keywords not in self._excluded:
                for name in sorted(others.keys() - self._excluded):
                    if (text := encode_value(others[name], strict)) != LIVE:
                        found.append(f"*{_label(name)}{text}")
        except LiveObject as exc:
            raise _not_plain(f"the argument {name!r}", exc) from None
        except RecursionError as exc:
            raise _endless(f"the argument {name!r}") from exc
        return "".join(found)

    def _some_of(self, paths: tuple[_Path, ...], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
        bound, extra, others = self._calls.bind(args, kwargs)
        values = {**others, self._calls.rest: extra, self._calls.keywords: others, **self._calls.defaults, **bound}
        return "".join(
            [
                _label(path) + _encode(_follow(values.get(first, ABSENT), rest), f"the argument {path!r}")
                for path, first, rest in paths
            ]
        )

    def _column(self, parameter: inspect.Parameter) -> _Column | None:
        name, calls = parameter.name, self._calls
        # The object that a method belongs to is live, even if its class is a bundle of data.
        is_self = parameter is calls.parameters[0] and name in ("self", "cls")
        if name in self._excluded or is_self:
            return None
        default = encode_value(parameter.default, False) if name in calls.defaults else None
        return name, _label(name), default

    def _compile(self, choice: Iterable[str], excluded: frozenset[str]) -> tuple[_Path, ...]:
        # Sorted, because neither the order in which names are written nor that of a set may matter.
        paths = tuple((path, *_first_and_rest(path)) for path in sorted(set(choice)))
        if not paths:
            raise PolicyError("the choice names no argument: name one, or choose None for no fingerprint")
        for path, first, _ in paths:
            self._calls.check_name(first)
            if first in excluded:
                raise PolicyError(f"{path!r} is both chosen and left out")
        return paths


_Column = tuple[str, str, str | None]  # a parameter's name, its label, its default as text
_Path = tuple[str, str, list[str | int]]  # a path, its parameter's name, the segments below


class _Calls:
    """A function's parameters, arranged to look at its calls."""

    def __init__(self, function: Callable[..., Any] | inspect.Signature, name: str | None) -> None:
        try:
            signature = function if isinstance(function, inspect.Signature) else inspect.signature(function)
        except (ValueError, TypeError):  # some functions of C modules have no signature
            signature = inspect.signature(lambda *args, **kwargs: None)
        self.function = name or getattr(function, "__qualname__", "the function")
        every = list(signature.parameters.values())
        by_keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        self.parameters = [p for p in every if p.kind in (*by_position, *by_keyword)]
        self.names = tuple(p.name for p in self.parameters)
        self.positional = tuple(p.name for p in every if p.kind in by_position)
        self.by_keyword = frozenset(p.name for p in every if p.kind in by_keyword)
        self.rest = next((p.name for p in every if p.kind is p.VAR_POSITIONAL), "")
        self.keywords = next((p.name for p in every if p.kind is p.VAR_KEYWORD), "")
        self.defaults = {p.name: p.default for p in self.parameters if p.default is not p.empty}
        self.required = [name for name in self.names if name not in self.defaults]
        # A call with only positional arguments, from ``least`` to ``most`` of them, needs no binding by name.
        self.least = max((self.names.index(name) + 1 for name in self.required), default=0)
        self.most = len(self.positional)

    def check_name(self, name: str) -> None:
        known = [*self.names, *filter(None, (self.rest, self.keywords))]
        if name not in known and not self.keywords:
            raise PolicyError(f"{self.function} has no parameter {name!r}: it has {', '.join(known) or 'none'}")

    def bind(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[dict[str, Any], tuple[Any, ...], dict[str, Any]]:
        """Return the arguments by parameter, those for ``*args``, and those for ``**kwargs``. Raises TypeError."""
        bound = dict(zip(self.positional, args, strict=False))
        extra = args[len(self.positional) :]
        others: dict[str, Any] = {}
        if extra and not self.rest:
            raise TypeError(f"{self.function}() takes {len(self.positional)} positional arguments, got {len(args)}")
        for name, value in kwargs.items():
            if name not in self.by_keyword:
                if not self.keywords:
                    raise TypeError(f"{self.function}() got an unexpected keyword argument {name!r}")
                others[name] = value
            elif name in bound:
                raise TypeError(f"{self.function}() got multiple values for argument {name!r}")
            else:
                bound[name] = value
        for name in self.required:
            if name not in bound:
                raise TypeError(f"{self.function}() missing required argument: {name!r}")
        return bound, extra, others


def _label(name: str) -> str:
    return f"{len(name)}:{name}"


def _first_and_rest(path: str) -> tuple[str, list[str | int]]:
    first, *rest = split_path(path)
    return str(first), rest


def _follow(value: Any, path: list[str | int]) -> Any:
    for index, segment in enumerate(path):
        if isinstance(segment, int):
            value = (
                value[segment] if isinstance(value, (list, tuple)) and -len(value) <= segment < len(value) else ABSENT
            )
        elif isinstance(value, Mapping):
            value = value.get(segment, ABSENT)
        elif segment == "*" and isinstance(value, (list, tuple)):
            return [_follow(element, path[index + 1 :]) for element in value]
        else:
            value = getattr(value, segment, ABSENT)
        if value is ABSENT:
            break
    return value


def _encode(value: Any, what: str) -> str:
    try:
        return encode_value(value)
    except LiveObject as exc:
        raise _not_plain(what, exc) from None
    except RecursionError as exc:
        raise _endless(what) from exc


def _not_plain(what: str, exc: LiveObject) -> PolicyError:
    return PolicyError(
        f"{what} is or holds a {exc}, which is not plain data and has no fingerprint: "
        "leave it out with exclude=, name the fields that count, or pass a function that returns them"
    )


def _endless(what: str) -> PolicyError:
    return PolicyError(f"{what} contains itself or nests too deeply: name the fields that count")
