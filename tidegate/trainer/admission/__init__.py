"""Which groups may start, and which are trained on: the staleness bound and retry limits."""
