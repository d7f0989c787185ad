"""Records of a standing service's clients: conversations, feedback, versions and their tests.

Folds of `clients.jsonl` and the ledger, for the dashboard and the report. Each line is read once.
"""
