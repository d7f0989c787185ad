"""compose.yaml, docker/kubernetes.yaml and the Dockerfiles agree on commands, addresses, volumes and probes.

`make lint-deploy` checks their formats.
"""

from __future__ import annotations

import argparse
import importlib
import re
import shlex
import tomllib
from fnmatch import fnmatch
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import yaml

from tests import REPO
from tests.deployment import (
    DOCKERFILES,
    Container,
    compose,
    composed,
    deployed,
    dockerfile,
    entrypoint,
    resources,
)
from tidegate.cli import _parser
from tidegate.config import Settings
from tidegate.gateway.http.openapi import SUMMARIES
from tidegate.settings.reading import load

CONTAINERS = [*composed().values(), *deployed()]
NAMES = [f"compose-{name}" for name in composed()] + [f"kubernetes-{one.name}" for one in deployed()]
CONFIG = next(part["data"]["config.toml"] for part in resources() if part["kind"] == "ConfigMap")


def command_of(container: Container) -> list[str]:
    """The words of `tidegate …`, also of a shell script."""
    if container.command[0] == "tidegate":
        return container.command[1:]
    return shlex.split(re.findall(r"exec tidegate (.*)", container.command[-1])[0])


def parsed(words: list[str]) -> tuple[argparse.Namespace, list[str]]:
    return _parser().parse_known_args(words)


@pytest.mark.parametrize("container", CONTAINERS, ids=NAMES)
def test_commands_and_their_settings_are_accepted(container: Container, tmp_path: Path) -> None:
    arguments, rest = parsed(command_of(container))
    module, _, name = arguments.settings_model.partition(":")
    path = Path(rest.pop(0)) if rest and not rest[0].startswith("--") else None
    if path is not None and path.is_absolute():
        path = tmp_path / "config.toml"
        path.write_text(CONFIG)
    file = None if path is None else REPO / path
    load(getattr(importlib.import_module(module), name), file, rest)


def test_every_trainer_that_is_started_again_continues_if_there_is_a_run() -> None:
    files = ["examples/slurm/train.sbatch", "examples/skypilot/train.yaml"]
    words = [(REPO / file).read_text() for file in files]
    words += [" ".join(one.command) for one in CONTAINERS if "train" in one.command]
    assert len(words) == 4
    for text in words:
        assert re.findall(r"--resume[ =]?(\w*)", text) == ["auto"], text


def test_each_image_has_a_dockerfile_whose_copied_files_exist() -> None:
    assert {f"{name}.Dockerfile" for name in DOCKERFILES.values()} == {
        path.name for path in (REPO / "docker").glob("*.Dockerfile")
    }
    ignored = (REPO / ".dockerignore").read_text().splitlines()
    kept = [line.removeprefix("!") for line in ignored if line.startswith("!")]
    for image in DOCKERFILES:
        for line in re.findall(r"^COPY (.*)$", dockerfile(image), re.MULTILINE):
            for source in [word for word in line.split()[:-1] if not word.startswith("--")]:
                assert (REPO / source).exists(), f"{image} copies {source}"
                assert any(fnmatch(source, name) or source.startswith(f"{name}/") for name in kept), source


CUDA_OF_TORCH = {"2.13.0": "13.0"}
"""CUDA of torch on PyPI, by the version that the extra `train` pins; SGLang 0.5.23 has the same CUDA."""


def test_the_images_toolkit_has_the_version_of_torchs_cuda() -> None:
    extras = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (torch,) = (one.partition("==")[2] for one in extras["train"] if one.startswith("torch=="))
    found = re.search(r"nvidia/cuda:(\d+\.\d+)\.", dockerfile("tidegate-cuda"))
    assert found is not None
    assert found[1] == CUDA_OF_TORCH[torch]


def test_versions_in_images_are_those_of_the_project() -> None:
    extras = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    torch = next(one for one in extras["train"] if one.startswith("torch=="))
    assert f" {torch}\n" in dockerfile("tidegate")
    sglang = re.findall(r'"sglang==([\d.]+)"', (REPO / "requirements" / "sglang-cpu.txt").read_text())
    assert [f"SGLANG_VERSION={version}" in dockerfile("tidegate-cuda") for version in sglang] == [True]


def test_images_do_not_run_as_root() -> None:
    for image in DOCKERFILES:
        assert re.search(r"^USER [1-9]\d*$", dockerfile(image), re.MULTILINE)


def test_volumes_and_folders_of_compose_exist() -> None:
    volumes = compose()["volumes"]
    for container in composed().values():
        for source in container.mounts.values():
            assert source in volumes or (source.startswith("./") and (REPO / source).exists()), source


def test_claims_volumes_and_secrets_of_kubernetes_exist() -> None:
    claims = {part["metadata"]["name"] for part in resources() if part["kind"] == "PersistentVolumeClaim"}
    maps = {part["metadata"]["name"] for part in resources() if part["kind"] == "ConfigMap"}
    templates = {
        claim["metadata"]["name"]
        for part in resources()
        if "spec" in part
        for claim in part["spec"].get("volumeClaimTemplates", [])
    }
    for container in deployed():
        volumes = {volume["name"]: volume for volume in container.spec["pod"].get("volumes", [])}
        assert set(container.mounts.values()) <= volumes.keys() | templates
        for volume in volumes.values():
            assert volume.get("persistentVolumeClaim", {}).get("claimName", min(claims)) in claims
            assert volume.get("configMap", {}).get("name", min(maps)) in maps


def test_the_gateways_journal_is_on_a_volume() -> None:
    words = entrypoint("tidegate-gateway")
    journal = words[words.index("--journal") + 1]
    for container in CONTAINERS:
        if container.image == "tidegate-gateway":
            assert container.mounts[journal] == "journal"


def test_trainer_and_engines_have_the_runs_at_one_path() -> None:
    for containers in (list(composed().values()), list(deployed())):
        paths = [path for one in containers for path, volume in one.mounts.items() if volume == "runs"]
        assert len(paths) == 2
        assert len(set(paths)) == 1


def test_addresses_name_services_and_their_ports() -> None:
    services = {name: _port(container) for name, container in composed().items() if name != "trainer"}
    urls = re.findall(r"=(http://[\w.-]+:\d+)", " ".join(composed()["trainer"].command))
    assert len(urls) == 2
    for url in urls:
        assert services[str(urlsplit(url).hostname)] == urlsplit(url).port
    ports = {
        part["metadata"]["name"]: part["spec"]["ports"][0]["port"]
        for part in resources()
        if part["kind"] == "Service"
    }
    settings = tomllib.loads(CONFIG)
    replicas = next(
        part["spec"]["replicas"] for part in resources()
        if part["kind"] == "StatefulSet" and part["metadata"]["name"] == "tidegate-engine"
    )  # fmt: skip
    assert len(settings["engine"]["urls"]) == replicas
    for url in [settings["gateway"]["url"], *settings["engine"]["urls"]]:
        assert ports[str(urlsplit(url).hostname).rpartition(".")[2]] == urlsplit(url).port


def _port(container: Container) -> int:
    return int(re.findall(r"port[= ](\d+)", " ".join(container.command))[0])


def test_probes_call_routes_that_need_no_key() -> None:
    probed = [
        container.spec[kind]["httpGet"]["path"]
        for container in deployed()
        for kind in ("startupProbe", "livenessProbe", "readinessProbe")
        if container.name != "trainer"
    ]
    assert set(probed) == {"/health"}
    assert "GET /health" in SUMMARIES
    assert "/health" in dockerfile("tidegate-gateway")
    assert "/health" in str(composed()["engine"].spec["healthcheck"]["test"])


def test_keys_are_required_and_never_in_the_files() -> None:
    for container in composed().values():
        for name, value in container.spec.get("environment", {}).items():
            assert value.startswith(f"${{{name}:?")
    for container in deployed():
        assert all("valueFrom" in variable for variable in container.spec.get("env", []))


def test_the_run_of_compose_and_of_kubernetes_is_the_demo(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(CONFIG)
    deployed_run = load(Settings, tmp_path / "config.toml", [])
    composed_run = load(Settings, REPO / "docker" / "config.toml", [])
    for run in (deployed_run, composed_run):
        assert (run.model.path, run.env.use, run.agent.use) == (
            Path("examples/tiny_base/model"), "arithmetic", "solver",
        )  # fmt: skip


def test_workers_of_the_example_are_accepted() -> None:
    words = re.findall(r"^ENTRYPOINT (.*)$", (REPO / "examples/remote/Dockerfile").read_text(), re.MULTILINE)
    pod = yaml.safe_load((REPO / "examples/remote/kubernetes.yaml").read_text())["spec"]["template"]["spec"]
    arguments, rest = parsed([*yaml.safe_load(words[0])[1:], *pod["containers"][0]["args"]])
    assert rest == []
    assert arguments.concurrency == 64
