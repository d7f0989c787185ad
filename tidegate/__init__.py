"""Tidegate: point any agent's base_url at it, and it learns."""

__version__ = "0.1.0"
