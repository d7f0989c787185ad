"""Groups of sessions: finished, rewarded, leased."""
