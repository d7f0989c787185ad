"""Graders of answers."""
