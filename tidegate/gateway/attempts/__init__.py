"""Attempts that workers elsewhere take from the gateway."""
