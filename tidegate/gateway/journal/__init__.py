"""The journal: a gateway's sessions, turns and groups on disk, in SQLite."""
