"""A run on a Ray cluster. `placement` and `passing` know nothing of Ray; the rest is imported late."""
