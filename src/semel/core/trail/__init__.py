"""The history of events: what a moment and a minute are, and the Ops by which a store keeps and reads them."""
