"""The history of events, in a store: the hook that writes it, and the readers."""

from semel.core.trail.minutes import Minute, bucket_end, quantile
from semel.core.trail.moments import Moment
from semel.trail.aio_reader import AsyncTrailReader
from semel.trail.hook import Trail
from semel.trail.reader import TrailReader

__all__ = ["AsyncTrailReader", "Minute", "Moment", "Trail", "TrailReader", "bucket_end", "quantile"]
