"""Requests to the embedded engine and their texts."""
