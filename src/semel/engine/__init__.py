"""Runs handlers: drives the flows of the core over a store, renews leases, waits, cancels, and shields clean-up."""
