"""Sessions: the gateway's record of each agent's run."""
