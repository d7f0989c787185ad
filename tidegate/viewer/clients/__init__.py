"""Records of a standing service's clients: folds of `clients.jsonl`. Each line is read once."""
