"""Environments with a shell in a sandbox."""
