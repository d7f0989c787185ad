"""Attempts that remote workers take from the gateway."""
