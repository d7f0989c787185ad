"""The customer-service environment: a shop's database, its rules, and a simulated user."""
