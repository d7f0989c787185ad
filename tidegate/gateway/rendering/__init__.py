"""Renders messages to token ids with the model's chat template and tokenizer."""
