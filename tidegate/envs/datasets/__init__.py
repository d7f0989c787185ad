"""Environments that are lists of tasks."""
