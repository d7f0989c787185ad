"""Options of sandboxes: invalid ones are refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from tidegate.agents.command import CommandAgent
from tidegate.errors import ConfigError, InfrastructureError, SandboxError
from tidegate.sandbox import SandboxLimits, SandboxPool, open_sandbox
from tidegate.sandbox.proxy import PathProxy


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "bubblewarp"}, "no sandbox backend 'bubblewarp'; did you mean 'bubblewrap'?"),
        ({"backend": "none", "image": "x"}, "'none' takes no image"),
        ({"backend": "none", "read_only": ["/opt"]}, "'none' takes no read_only paths"),
        ({"backend": "docker"}, "'docker' needs an image"),
    ],
)
async def test_an_option_that_a_backend_does_not_take_is_refused(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message.replace("?", r"\?")):
        await open_sandbox(**options)


def test_limits_are_positive() -> None:
    with pytest.raises(ConfigError, match="memory_mb = 0 must be positive"):
        SandboxLimits(memory_mb=0)
    with pytest.raises(ConfigError, match="size 0"):
        SandboxPool(size=0)


async def test_without_the_program_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(SandboxError, match="apt-get install bubblewrap"):
        await open_sandbox()
    assert issubclass(SandboxError, InfrastructureError)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sandbox": "docker"}, "agent.options.sandbox = 'docker': only bubblewrap"),
        ({"sandbox": "bubblewrap", "limits": {"memory": 1}}, "no 'memory'; did you mean 'memory_mb'"),
        ({"sandbox": "bubblewrap", "read_only": ["/nonexistent"]}, "no file or folder '/nonexistent'"),
        ({"limits": {"memory_mb": 1}}, "apply only with agent.options.sandbox"),
        ({"sandbox": "bubblewrap", "user": "root"}, "does not apply in a sandbox"),
    ],
)
def test_a_command_refuses_invalid_options_of_its_sandbox(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CommandAgent(["true"], **options)


@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        ("/s/abc/v1/chat/completions", True),
        ("/s/abc/mcp?x=/../y", True),
        ("/v1/models", True),
        ("/s/abcd/v1/models", False),
        ("/s/abc", False),
        ("/control", False),
        ("/v1/../control", False),
        ("/s/abc/%2e%2e/control", False),
        ("//control", False),
        ("/s/abc//v1", False),
        ("/s/abc/\\..\\control", False),
        ("http://other/v1/models", False),
        ("/s/abc/v1/messages/count_tokens", True),
        ("/s/abc/tools/read", True),
        ("/s/abc/respond", True),
        ("/s/abc/finish", False),
        ("/s/abc/tools/read/finish", False),
        ("/s/abc/v1/groups/g/episodes", False),
        ("/v1/groups/g/seal", False),
        ("/v1/feedback", False),
        ("/v1/conversations/c", False),
    ],
)
def test_only_paths_of_the_session_are_passed_on(path: str, allowed: bool) -> None:
    assert PathProxy("http://127.0.0.1:8000/s/abc/v1").allows(path) is allowed


def test_an_address_without_a_path_gives_no_access_to_all_paths() -> None:
    proxy = PathProxy("http://127.0.0.1:8000/v1")
    assert (proxy.allows("/v1/models"), proxy.allows("/control"), proxy.allows("/")) == (True, False, False)
