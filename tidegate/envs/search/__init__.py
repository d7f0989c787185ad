"""The search question-answering environment."""
