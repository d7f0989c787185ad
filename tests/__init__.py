"""The tests of Tidegate."""

from pathlib import Path

REPO = Path(__file__).parents[1]
