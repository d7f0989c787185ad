"""Checkpoints: written, verified, read."""
