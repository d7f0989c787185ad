"""Runs groups of episodes and evaluations."""
