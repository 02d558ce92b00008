"""The shells that drive the flows: run the handler, keep its lease alive, sleep, cancel, and shield clean-up."""
