"""Clients with a project key: the groups that they form, and the conversations of plain calls."""
