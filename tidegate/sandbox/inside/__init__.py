"""The part of a sandbox that runs inside it, on Python's standard library alone."""
