"""Simulates runs on other machines, with the admission core of real runs."""
