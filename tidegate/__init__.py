"""Tidegate: trains the model behind any agent by reinforcement learning."""

__version__ = "0.1.0"
