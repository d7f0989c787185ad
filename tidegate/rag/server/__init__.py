"""The HTTP server of the retrieval server."""
