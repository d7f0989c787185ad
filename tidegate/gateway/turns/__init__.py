"""Turn pipeline: from a request to a recorded turn."""
