"""What users of Semel test with: ``conformance`` proves a store. Nothing in the library imports from here."""
