"""Supervised fine-tuning: trains a model on recorded episodes and on chats."""
