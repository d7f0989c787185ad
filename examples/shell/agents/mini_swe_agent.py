"""mini-swe-agent whose commands run in the environment's shell. The agent `command` runs it."""

from __future__ import annotations

import json
import os
import sys
import urllib.request
from pathlib import Path
from typing import Any

import minisweagent
import yaml
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models import get_model

TIMEOUT_S = 60


class SessionShell(LocalEnvironment):
    """Runs commands with the tool `bash` of the episode's session."""

    def execute(self, action: dict[str, Any], cwd: str = "", *, timeout: int | None = None) -> dict[str, Any]:
        output = {"output": call_bash(action["command"]), "returncode": 0, "exception_info": ""}
        self._check_finished(output)
        return output


def call_bash(command: str) -> str:
    """Returns the output of a command; its last line is the exit status unless that is 0."""
    request = urllib.request.Request(
        os.environ["TIDEGATE_MCP_URL"].removesuffix("mcp") + "tools/bash",
        json.dumps({"command": command}).encode(),
        {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
        return str(json.load(answer)["content"])


def main() -> None:
    settings = yaml.safe_load((Path(minisweagent.package_dir) / "config" / "mini.yaml").read_text())
    options = {"model_class": "litellm", "cost_tracking": "ignore_errors"}
    model = get_model(f"openai/{os.environ['MODEL']}", {**settings["model"], **options})
    templates = {key: settings["agent"][key] for key in ("system_template", "instance_template")}
    agent = DefaultAgent(model, SessionShell(**settings["environment"]), **templates)
    print(agent.run(sys.stdin.read())["submission"].strip())


if __name__ == "__main__":
    main()
