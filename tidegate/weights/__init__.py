"""What engine and trainer share about a model: weight files and checksums, vocabulary, cache argument, and
the process group that broadcasts weights."""
