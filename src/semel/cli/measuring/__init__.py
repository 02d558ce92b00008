"""What a record takes in each kind of store: some are written there, in a place of their own, measured, and removed."""

from semel.cli.measuring.interrupts import Interrupts
from semel.cli.measuring.kinds import MEASURES, measure
from semel.cli.measuring.samples import Sample

__all__ = ["MEASURES", "Interrupts", "Sample", "measure"]
