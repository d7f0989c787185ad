"""The customer-service environment: a shop's database, its policy, and a simulated user."""
