"""The HTTP contract as pure code: what a route promises, and what a request is answered."""
