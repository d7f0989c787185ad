"""The journal: what a gateway must not lose, in SQLite."""
