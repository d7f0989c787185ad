"""The losses, their parts, and score centering."""
