"""A run on a Ray cluster. `placement` and `environment` do not import Ray; the others are imported late."""
