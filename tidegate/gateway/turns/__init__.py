"""From a request to a recorded turn."""
