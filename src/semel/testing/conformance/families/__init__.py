"""The proofs, one module for each family of behaviour; ``suite.py`` lists them."""
