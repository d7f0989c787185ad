"""The HTTP server of the embedded engine."""
