"""What is known of one agent's run."""
