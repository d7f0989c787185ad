"""Documents: read, stored, numbered."""
