"""Errors of the dashboard's requests."""

from __future__ import annotations

from tidegate.errors import TidegateError


class NotFound(TidegateError):
    """A step, group, episode or turn that the run's files do not hold; the message names it."""
