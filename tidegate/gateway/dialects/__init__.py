"""API dialects: one module each for its requests, replies, streams and errors."""
