"""Sections of settings."""
