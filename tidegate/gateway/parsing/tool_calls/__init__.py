"""The forms in which models write tool calls: one file each, and `registry` knows them all."""
