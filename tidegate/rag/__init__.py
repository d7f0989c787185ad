"""Retrieval: an index built from a corpus, and the server that answers from it."""
