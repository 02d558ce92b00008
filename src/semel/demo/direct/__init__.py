"""Storms straight on the store: worker processes call a protected function and are killed."""
