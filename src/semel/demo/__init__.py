"""The demo: retry storms on a store or over HTTP, judged by evidence that Semel did not write."""
