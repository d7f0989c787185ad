"""The HTTP routes of one gateway."""
