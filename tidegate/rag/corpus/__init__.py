"""The documents of an index."""
