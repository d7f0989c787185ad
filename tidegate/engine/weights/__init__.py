"""Weight updates of the embedded engine."""
