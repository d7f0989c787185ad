"""What runs inside vLLM's worker, in the environment of its own: this directory alone is on its path."""
