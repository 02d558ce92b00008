"""`make bench`: Semel beside the bare drivers and its peer, on this machine, in one run. It prints ratios.

`turns` lets callers loose on a job for a moment; `contest` interleaves the contestants of one match and compares them;
`memory`, `sqlite` and `postgres` set up the matches; `aims` and `report` say what came out.
"""
