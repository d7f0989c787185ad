"""Several gateway processes behind one address."""
