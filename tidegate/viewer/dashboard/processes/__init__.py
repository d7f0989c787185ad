"""The processes of a run: their load over time, and the ends of their logs."""
