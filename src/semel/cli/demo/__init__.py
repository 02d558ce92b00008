"""``semel demo``: a retry storm one can watch, and a verdict from evidence that Semel did not write."""

from semel.cli.demo.command import HELP, NAME, configure, run

__all__ = ["HELP", "NAME", "configure", "run"]
