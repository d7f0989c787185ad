"""Data-parallel training over several ranks."""
