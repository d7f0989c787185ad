"""Parses sampled tokens into text, reasoning and tool calls."""
