"""From leased groups to rows with advantages."""
