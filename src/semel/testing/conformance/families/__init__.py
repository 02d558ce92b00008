"""The proofs, in one module for each family of behaviour. ``suite.py`` lists the families."""
