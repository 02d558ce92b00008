"""Measure what a record takes in each kind of store: write samples to a place of their own, measure, remove them."""

from semel.cli.measuring.kinds import MEASURES, measure
from semel.cli.measuring.samples import Interrupts, Measured, Sample

__all__ = ["MEASURES", "Interrupts", "Measured", "Sample", "measure"]
