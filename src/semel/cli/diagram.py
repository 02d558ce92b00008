"""``semel diagram``: the life of a record as a Mermaid diagram, drawn from the transition table."""

from __future__ import annotations

import argparse

from semel.cli.exits import OK

NAME = "diagram"
HELP = "Print the life of a record as a Mermaid state diagram."


def configure(parser: argparse.ArgumentParser) -> None:
    """It has no options."""


def run(args: argparse.Namespace) -> int:
    from semel.core.states import mermaid

    print(mermaid())
    return OK
