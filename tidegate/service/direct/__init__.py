"""Serves routes from the HTTP protocol, without ASGI's overhead."""
