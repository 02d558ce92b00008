"""A rule as plain data, and back: the ``x-idempotency`` of an OpenAPI operation.

The names are those of the settings. The most important settings are always there, others only if they differ from the
default. A recover hook is code: it is named, and refused when it is read back.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from semel.core.keys import MAX_KEY_LENGTH, KeyFormat
from semel.core.ops import FOREVER
from semel.core.policy import Policy, Wait
from semel.core.states import Takeover
from semel.errors import ConfigurationError
from semel.http.contract.rules import Conditional, Exempt, Idempotent, Natural, Rule

EXTENSION: Final = "x-idempotency"

_KEYED: Final[dict[str, type[Idempotent]]] = {"action": Idempotent, "conditional": Conditional}
_UNITS: Final = ((86400, "d"), (3600, "h"), (60, "m"), (1, "s"))
_TAKEOVERS: Final = {Takeover.RETRY: "retry", Takeover.REJECT: "reject", Takeover.RECOVER: "recover"}
_SETTINGS: Final = (
    "key_mode",
    "reused_status",
    "in_use_status",
    "external_effects",
    "canonical_json",
    "compare_parts",
    "compare_decompressed",
    "keep_body",
    "max_stored_body",
    "max_request_body",
    "precondition_required",
    "include",
    "exclude",
    "fingerprint_headers",
    "released",
    "replay_headers",
    "replay_marker",
)
"""Settings that are copied if they differ from the default."""


def duration_text(seconds: float) -> str | None:
    """Return a duration as ``Policy`` reads it: ``86400`` is ``"24h"``. None means for ever."""
    if seconds >= FOREVER:
        return None
    if seconds != int(seconds):
        return f"{seconds * 1000:.3f}".rstrip("0").rstrip(".") + "ms"
    left, text = int(seconds), ""
    for size, unit in _UNITS:
        if unit == "d" and left < 2 * size:  # one day is written in hours
            continue
        count, left = divmod(left, size)
        text += f"{count}{unit}" if count else ""
    return text or "0s"


def plain_rule(rule: Rule, policy: Policy | None = None) -> dict[str, Any]:
    """Return the rule under the guard's policy, as data for JSON."""
    if isinstance(rule, Exempt):
        return {"class": rule.kind, "reason": rule.reason}
    if isinstance(rule, Natural):
        return {"class": rule.kind, "absent": sorted(rule.absent)}
    rule = rule.under(policy or Policy())
    promised = rule.policy
    plain: dict[str, Any] = {
        "class": rule.kind,
        "required": rule.required,
        "key_format": _plain_format(rule.key_format),
        "scope": rule.scope,
        "guarantee": promised.guarantee,
        "ttl": duration_text(promised.ttl_seconds),
        "lease": duration_text(promised.lease_seconds),
        "on_duplicate": {"wait": duration_text(promised.wait_seconds)} if promised.wait_seconds else "raise",
        "on_abandoned": _TAKEOVERS[promised.takeover],
        "on_store_error": "open" if promised.fails_open else "closed",
    }
    if promised.reject_seconds:
        plain["reject_expired_for"] = duration_text(promised.reject_seconds)
    if promised.max_run_time is not None:
        plain["max_run_time"] = duration_text(promised.max_run_seconds)
    if promised.on_unstored != "deliver":
        plain["on_unstored"] = promised.on_unstored
    if promised.on_interrupted is not None:
        plain["on_interrupted"] = promised.on_interrupted
    default = type(rule)()
    for name in _SETTINGS:
        setting = getattr(rule, name, None)
        if setting != getattr(default, name, None):
            if isinstance(setting, (tuple, frozenset)):
                setting = sorted(setting) if isinstance(setting, frozenset) else list(setting)
            plain[name] = setting
    return plain


def rule_from_plain(plain: Any, where: str = EXTENSION) -> Rule:
    """Return the rule that plain data describes; ``"action"`` alone is ``idempotent()``. Raises ConfigurationError."""
    if isinstance(plain, str):
        plain = {"class": plain}
    if not isinstance(plain, Mapping):
        raise ConfigurationError(f'{where}: a rule is an object with a "class", not {plain!r}')
    settings = dict(plain)
    kind = settings.pop("class", "action")
    try:
        if kind == "exempt":
            return Exempt(**settings)
        if kind == "natural":
            return Natural().with_settings({name: frozenset(each) for name, each in settings.items()})
        if kind not in _KEYED:
            raise ConfigurationError(f"class is one of action, conditional, natural, exempt, not {kind!r}")
        return _KEYED[kind]().with_settings(_settings(settings))
    except ConfigurationError as error:
        raise ConfigurationError(f"{where}: {error}") from error
    except (TypeError, ValueError, AttributeError) as error:
        raise ConfigurationError(f"{where} cannot be read as a rule: {error}") from error


def _settings(plain: dict[str, Any]) -> dict[str, Any]:
    settings = dict(plain)
    if settings.get("on_abandoned") == "recover":
        raise ConfigurationError("a recover hook is code: declare this operation in the program")
    for name, setting in plain.items():
        default = getattr(Conditional, name, None)
        if isinstance(default, (bool, int)) and type(setting) is not type(default):
            raise ConfigurationError(f"{name} is a {type(default).__name__}, not {setting!r}")
        if isinstance(default, (tuple, frozenset)):
            settings[name] = type(default)(setting)
    waited = settings.get("on_duplicate")
    if isinstance(waited, Mapping):
        settings["on_duplicate"] = Wait(waited["wait"]) if set(waited) == {"wait"} else waited
    if "key_format" in settings:
        settings["key_format"] = _format(settings["key_format"])
    return settings


def _plain_format(format: KeyFormat) -> Any:
    pattern = None if format.name in KeyFormat.NAMES or format.pattern is None else format.pattern.pattern
    if pattern is None and format.max_length == MAX_KEY_LENGTH:
        return format.name
    named = {"pattern": pattern} if pattern is not None else {"name": format.name}
    return {**named, "max_length": format.max_length}


def _format(plain: Any) -> KeyFormat:
    if isinstance(plain, str):
        return KeyFormat.named(plain)
    longest = plain.get("max_length", MAX_KEY_LENGTH)
    if "pattern" in plain:
        return KeyFormat.matching(plain["pattern"], max_length=longest)
    return KeyFormat.named(plain.get("name", "any"), max_length=longest)
