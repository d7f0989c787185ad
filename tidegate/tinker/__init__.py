"""Trains and samples at a service that speaks the Tinker protocol, by its SDK `tinker`."""
