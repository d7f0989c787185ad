"""A client of the dashboard's server."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from starlette.testclient import TestClient

from tidegate.viewer.dashboard.app import create_app
from tidegate.viewer.dashboard.run import FollowedRun

Ask = Callable[..., Any]


def client_of(run_dir: Path, **more: Any) -> TestClient:
    return TestClient(
        create_app(FollowedRun(run_dir), **more), base_url="http://127.0.0.1", raise_server_exceptions=False
    )


def asking(client: TestClient) -> Ask:
    def ask(path: str, **query: Any) -> Any:
        response = client.get(f"/api/{path}", params=query)
        assert response.status_code == 200, response.text
        return response.json()

    return ask
