"""What a standing service's records say of its clients: conversations, feedback, versions and their tests.

Folds of `clients.jsonl` and the ledger, for the dashboard and the report. Each line is read once.
"""
