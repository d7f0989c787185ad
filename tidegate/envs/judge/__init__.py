"""A model that scores episodes by a rubric."""
