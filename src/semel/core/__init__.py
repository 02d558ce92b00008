"""The pure heart: states, Ops, flows, keys, fingerprints, policies, snapshots. Standard library only, no I/O."""
