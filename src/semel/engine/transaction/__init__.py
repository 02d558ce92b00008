"""The transactional mode: the record commits in the caller's own transaction."""
