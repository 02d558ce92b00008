"""``semel audit``: what an OpenAPI document says about writes that are sent twice."""

from __future__ import annotations

import argparse
import json
import re
import time
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

from semel import __version__
from semel.cli.commands import FAILED, OK, Command, as_json, say, ticking
from semel.errors import ConfigurationError
from semel.verify import findings

if TYPE_CHECKING:
    from semel.verify.audit import Audit

_LARGEST: Final = 64 * 1024 * 1024
_TIMEOUT: Final = 30.0
_PATH: Final = re.compile(r"""\s*["']?(/.*?)["']?\s*:(?=[\s{]|$)""")
"""The line where a path of the document begins."""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("document", metavar="FILE_OR_URL", help="an OpenAPI document of version 3, in JSON or YAML")
    parser.add_argument(
        "--header", metavar="NAME", help='the header that has the key (default: any with "idempotency" in its name)'
    )
    shape = parser.add_mutually_exclusive_group()
    shape.add_argument("--json", action="store_true", help="one JSON object")
    shape.add_argument("--sarif", action="store_true", help="SARIF 2.1.0, for code scanning in CI")


def run(args: argparse.Namespace) -> int:
    from semel.verify.audit import audit

    with ticking("reading"):
        text = _read(args.document)
        result = audit(_parse(args.document, text), header=args.header)
    if args.json:
        print(as_json(_plain(result)))
    elif args.sarif:
        print(json.dumps(_sarif(result, args.document, text), indent=2))
    else:
        say(_page(result))
    return FAILED if findings.failed(result.findings) else OK


def _read(where: str) -> str:
    from urllib.error import URLError
    from urllib.request import urlopen

    try:
        if re.match(r"https?://", where):
            end, data = time.monotonic() + _TIMEOUT, bytearray()
            with urlopen(where, timeout=_TIMEOUT) as answer:
                while len(data) <= _LARGEST and (part := answer.read1(65536)):
                    data += part
                    if time.monotonic() > end:  # the other time limit is that of each part
                        raise TimeoutError(f"it takes longer than {_TIMEOUT:.0f} s")
        else:
            with open(where, "rb") as file:
                data = bytearray(file.read(_LARGEST + 1))
    except (URLError, OSError, ValueError) as error:
        raise ConfigurationError(f"{where} cannot be read: {error}") from error
    if len(data) > _LARGEST:
        raise ConfigurationError(f"{where} has more than {_LARGEST // 1024 // 1024} MiB")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{where} is not text in UTF-8: {error}") from error


def _parse(where: str, text: str) -> dict[str, Any]:
    found = _load(where, text)
    if not isinstance(found, dict):
        what = "is empty" if found is None else f"holds a {type(found).__name__}"
        raise ConfigurationError(f"{where} {what}, and no OpenAPI document")
    return found


def _load(where: str, text: str) -> Any:
    """Read JSON, and YAML if PyYAML is there."""
    if text.lstrip().startswith("{"):
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigurationError(f"{where} is not JSON: {error}") from error
    try:
        import yaml
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"{where} is not JSON. To read YAML, install PyYAML: pip install 'semel[audit]'"
        ) from error
    try:
        return yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigurationError(f"{where} is neither JSON nor YAML: {error}") from error


def _plain(result: Audit) -> dict[str, Any]:
    return {
        "title": result.title,
        "operations": [{"method": each.method, "path": each.path, "class": each.kind} for each in result.writes],
        "findings": findings.plain(result.findings),
    }


def _page(result: Audit) -> str:
    kinds = Counter(each.kind for each in result.writes)
    classed = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items())) or "none"
    last = f"{result.title}: {len(result.writes)} writes ({classed}); {findings.summary(result.findings)}"
    return "\n".join([*findings.lines(result.findings), last])


def _sarif(result: Audit, where: str, text: str) -> dict[str, Any]:
    from urllib.parse import quote

    from semel.verify.audit import RULES

    lines = text.splitlines()
    starts: dict[str, int] = {}
    for at, line in enumerate(lines):
        if found := _PATH.match(line):
            starts.setdefault(found[1], at)
    rules = [
        {"id": rule, "shortDescription": {"text": demand}, "defaultConfiguration": {"level": severity}}
        for rule, (severity, demand) in RULES.items()
    ]
    results = [
        {
            "ruleId": each.rule,
            "level": each.severity,
            "message": {"text": f"{each.method} {each.path}: {each.message}"},
            "locations": [
                {
                    "physicalLocation": {
                        "artifactLocation": {"uri": quote(where, safe="/:?#[]@!$&'()*+,;=%")},
                        "region": {"startLine": _line_of(lines, starts, each)},
                    },
                    "logicalLocations": [{"fullyQualifiedName": f"{each.method} {each.path}"}],
                }
            ],
        }
        for each in result.findings
    ]
    driver = {"name": "semel audit", "semanticVersion": __version__, "rules": rules}
    return {
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [{"tool": {"driver": driver}, "results": results}],
    }


def _line_of(lines: list[str], starts: dict[str, int], finding: findings.Finding) -> int:
    """Find the line where the operation begins, by its text: parsers keep no lines. 1 if it cannot be found."""
    method = re.compile(rf"""\s*["']?{finding.method.lower()}["']?\s*:""")
    start = starts.get(finding.path)
    if start is None:
        return 1
    return next((at + 1 for at in range(start, len(lines)) if method.match(lines[at])), start + 1)


AUDIT = Command("audit", "Look for writes in an OpenAPI document that are not safe to send twice.", configure, run)
