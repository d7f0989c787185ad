"""The append-only ledger, its recovery and its audit."""
