"""Encoders of queries and passages."""
