"""Publishes weights to the engines."""
