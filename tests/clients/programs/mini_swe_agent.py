"""mini-swe-agent with its default settings: `chat`, `responses`, `messages`, `text` (commands as text)."""

from __future__ import annotations

import sys
from pathlib import Path

import minisweagent
import yaml
from calculator import MODEL, messages
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models import get_model

CLASSES = {"responses": "litellm_response", "text": "litellm_textbased"}

if __name__ == "__main__":
    dialect = sys.argv[1]
    name = "mini_textbased.yaml" if dialect == "text" else "mini.yaml"
    settings = yaml.safe_load((Path(minisweagent.package_dir) / "config" / name).read_text())
    provider = "anthropic" if dialect == "messages" else "openai"
    options = {"model_class": CLASSES.get(dialect, "litellm"), "cost_tracking": "ignore_errors"}
    model = get_model(f"{provider}/{MODEL}", {**settings["model"], **options})
    templates = {key: settings["agent"][key] for key in ("system_template", "instance_template")}
    agent = DefaultAgent(model, LocalEnvironment(**settings["environment"]), **templates)
    print(agent.run(messages()[-1]["content"])["submission"].strip())
