"""The wire dialects: one file each, which alone knows its requests, replies, streams and errors."""
