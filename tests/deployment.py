"""What compose.yaml, docker/kubernetes.yaml and the Dockerfiles run: the commands of their containers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml

from tests import REPO

DOCKERFILES = {"tidegate": "cpu", "tidegate-gateway": "gateway", "tidegate-cuda": "cuda-sglang"}
"""Name of an image → its file in docker/."""


@dataclass(frozen=True)
class Container:
    name: str
    image: str
    command: list[str]
    """The whole command, with the image's entry point."""
    mounts: dict[str, str] = field(default_factory=dict)
    """Path in the container → volume, or path on the host."""
    spec: dict[str, Any] = field(default_factory=dict)


def dockerfile(image: str) -> str:
    return (REPO / "docker" / f"{DOCKERFILES[image]}.Dockerfile").read_text()


def entrypoint(image: str) -> list[str]:
    found = re.search(r"^ENTRYPOINT (\[.*\])$", dockerfile(image), re.MULTILINE)
    assert found is not None
    return list(json.loads(found[1]))


def compose() -> dict[str, Any]:
    return dict(yaml.safe_load((REPO / "compose.yaml").read_text()))


def composed() -> dict[str, Container]:
    """The services of compose.yaml."""
    found = {}
    for name, spec in compose()["services"].items():
        mounts = {part.split(":")[1]: part.split(":")[0] for part in spec.get("volumes", [])}
        command = [*entrypoint(spec["image"]), *spec["command"]]
        found[name] = Container(name, spec["image"], command, mounts, spec)
    return found


def resources() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((REPO / "docker" / "kubernetes.yaml").read_text()))


def deployed() -> Iterator[Container]:
    """The containers of docker/kubernetes.yaml, without the first ones of a pod."""
    for resource in resources():
        pod = resource["spec"].get("template", {}).get("spec", {}) if "spec" in resource else {}
        for spec in pod.get("containers", []):
            first = spec.get("command", entrypoint(spec["image"]))
            mounts = {mount["mountPath"]: mount["name"] for mount in spec.get("volumeMounts", [])}
            yield Container(
                spec["name"], spec["image"], [*first, *spec.get("args", [])], mounts, {**spec, "pod": pod}
            )
