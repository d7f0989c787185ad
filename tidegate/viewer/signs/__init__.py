"""Warnings of a run that learns something other than its task, from the metrics of its steps."""
