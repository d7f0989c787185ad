"""Code that runs in vLLM's worker; only this directory is on the worker's path."""
