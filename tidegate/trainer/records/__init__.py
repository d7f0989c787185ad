"""The files that a run writes beside the ledger."""
