"""``semel size``: measure records in a store, and say how much room a window of answers takes."""
