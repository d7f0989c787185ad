"""Chat templates, tokenizers, and token-exact suffixes."""
