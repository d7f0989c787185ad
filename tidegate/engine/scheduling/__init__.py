"""Continuous batching."""
