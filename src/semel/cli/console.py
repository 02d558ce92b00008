"""``semel console``: the web page that shows what was asked, what ran, what is in doubt, and the ways out."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING, Any, Final

from semel.cli.commands import (
    OK,
    STORE_VARIABLE,
    URLS,
    Command,
    as_json,
    load_guard,
    names_guard,
    open_guard,
    plain_or_guard,
    port_number,
    say,
    stop_on_signals,
)
from semel.errors import ConfigurationError, MissingDependency

if TYPE_CHECKING:
    from semel.console import Console

PORT: Final = 8088
TOKEN_VARIABLE: Final = "SEMEL_CONSOLE_TOKEN"
"""The token of ``semel console`` without ``--token``. It keeps the token out of ``ps``."""
SHORTEST_TOKEN: Final = 16
"""Characters, where other machines can try."""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "url", metavar="URL", nargs="+", type=plain_or_guard,
        help=f"the stores: {URLS}; may be left out if {STORE_VARIABLE} is set. Or guards of a service, "
        "shop.orders:guard, with their secrets and key rings",
    )  # fmt: skip
    parser.add_argument("--app-dir", default=".", metavar="DIR", help="where to import a guard from (default: here)")
    parser.add_argument(
        "--port",
        type=port_number,
        default=PORT,
        metavar="P",
        help=f"the port; 0 takes a free one (default: {PORT})",
    )
    parser.add_argument(
        "--host", default="127.0.0.1", metavar="H",
        help="the address to listen on (default: 127.0.0.1); any other than this machine's own needs a token of at "
        "least 16 characters",
    )  # fmt: skip
    parser.add_argument(
        "--token", default=os.environ.get(TOKEN_VARIABLE), metavar="T",
        help="whoever knows it may look and act; without one, whoever is on this machine may look. May be left out if "
        f"{TOKEN_VARIABLE} is set",
    )  # fmt: skip
    parser.add_argument("--show-keys", action="store_true", help="show keys in full; otherwise their first characters")
    parser.add_argument("--show-bodies", action="store_true", help="show stored answers and the data of messages")
    parser.add_argument(
        "--running-too-long", default="10m", metavar="T", help="list what runs for longer as stuck (default: 10m)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object: where it is, and whether one can act")


def run(args: argparse.Namespace) -> int:
    try:
        from semel.console import Access, Console
        from semel.console.gate import allow_on_this_machine, is_loopback
        from semel.console.watched import Watched, names_for
    except ImportError as error:
        raise MissingDependency(error.name or "starlette", "console") from error

    if not is_loopback(args.host):
        if not args.token:
            raise ConfigurationError(
                f"on {args.host} others can reach the console: protect it with --token, or set {TOKEN_VARIABLE}"
            )
        if len(args.token) < SHORTEST_TOKEN:
            raise ConfigurationError(
                f"on {args.host} others can try tokens: use one of at least {SHORTEST_TOKEN} characters"
            )
    watched: dict[str, Watched] = {}
    for name, target in names_for(args.url).items():
        if names_guard(str(target)):
            watched[name] = load_guard(str(target), args.app_dir)
        else:
            with open_guard(str(target), reads_only=True) as guard:  # it exists and has its tables, or this raises
                guard.check()
            watched[name] = target
    shown: dict[str, Any] = {"show_keys": args.show_keys, "show_bodies": args.show_bodies}
    how: dict[str, Any] = {"running_too_long": args.running_too_long}
    if args.token:
        console = Console(watched, token=args.token, **shown, **how)
    else:
        console = Console(watched, allow=allow_on_this_machine(Access(who="local", **shown)), **how)
    return _serve(console, args)


def _serve(console: Console, args: argparse.Namespace) -> int:
    from semel.console.serving import listen, make_server

    server = make_server(console, server_header=False)

    def stop() -> None:
        server.should_exit = True
        console.stop_streams()

    with listen(args.host, args.port) as listening, stop_on_signals(stop):
        host, port = listening.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        url = f"http://{shown}:{port}/"
        if args.json:
            say(as_json({"url": url, "read_only": not args.token}))
        else:
            say(f"the console is on {url} (Ctrl-C ends it)" + ("" if args.token else "; read-only"))
        server.run([listening])
    return OK


CONSOLE = Command(
    "console", "Serve the web console: what was asked, what ran, what is in doubt, and the ways out.", configure, run
)
