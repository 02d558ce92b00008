"""Tests of the history of events."""
