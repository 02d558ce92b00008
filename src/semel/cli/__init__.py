"""The command line, ``semel``: a thin shell over the public library, with argparse only."""

from semel.cli.app import main

__all__ = ["main"]
