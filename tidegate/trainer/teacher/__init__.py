"""Distillation: a teacher scores the tokens that the student sampled."""
