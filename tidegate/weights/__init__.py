"""Weight files, their checksums, and the group that broadcasts them."""
