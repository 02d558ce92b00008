"""The tests. `tests.servers` is also used by the benchmarks."""
