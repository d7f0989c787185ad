"""The gateway as a process."""

from __future__ import annotations

from tidegate.errors import ConfigError
from tidegate.gateway.app import create_app
from tidegate.gateway.gateway import Gateway, GatewayOptions
from tidegate.serve import Listen, bind, run_app

__all__ = ["GatewayOptions", "serve"]


def serve(options: GatewayOptions, listen: Listen) -> None:
    """Serve until told to stop; raises StartError or ConfigError where it cannot begin."""
    if listen.host not in ("127.0.0.1", "localhost", "::1") and options.admin_key is None:
        raise ConfigError(
            f"the gateway would listen on {listen.host} for anyone: set an admin key, or listen on loopback"
        )
    gateway = Gateway(options)
    run_app(create_app(gateway), bind(listen), listen)
