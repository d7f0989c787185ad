"""The arrows of the house: who may import whom, and where the heavy libraries live."""

from __future__ import annotations

import ast
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "tidegate"
CORE = {
    "types",
    "errors",
    "config",
    "address",
    "tracebacks",
    "program",
    "devices",
    "cluster_settings",
    "sections",
    "serve",
    "loading",
    "observer",
    "services",
    "tether",
    "tethered",
    "failpoints",
    "prometheus",
    "key",
    "secrecy",
    "checksum",
    "weight_files",
    "weights_group",
    "__init__",
}
ALLOWED = {
    "gateway": set(),
    "engine": set(),
    "agents": {"rag.client"},
    "rag": set(),
    "viewer": set(),
    "plan": {"engine.options", "trainer.cluster.placement", "trainer.servers", "trainer.vllm"},
    "scaffold": set(),
    "vllm": {
        "engine.checks",
        "engine.control",
        "engine.http",
        "engine.params",
        "engine.requests",
        "engine.text",
        "engine.wire",
    },
    "simulation": {
        "trainer.admission",
        "trainer.entries",
        "trainer.groups",
        "trainer.ledger",
        "trainer.metrics",
        "trainer.rules",
    },
    "doctor": {
        "agents.base",
        "envs.base",
        "gateway.certify",
        "gateway.client",
        "gateway.protocol",
        "gateway.refusal",
        "gateway.render",
        "gateway.formats",
        "trainer.local",
        "trainer.processes",
        "trainer.workers",
    },
    "evaluation": {
        "envs.base",
        "gateway.rewards",
        "trainer.guard",
        "trainer.local",
        "trainer.preflight",
        "trainer.processes",
        "trainer.rollout",
        "trainer.trajectories",
        "trainer.workers",
    },
    "envs": {"rag.client"},
    "trainer": {"envs.base", "agents.base", "gateway.client"},
}
TORCH = {
    "weights_group",
    "devices",
    "trainer/policy",
    "trainer/loss",
    "trainer/diagnostics",
    "trainer/layout",
    "trainer/adapter",
    "trainer/forward",
    "trainer/optimizer",
    "trainer/recompute",
    "trainer/publish",
    "trainer/checkpoint",
    "trainer/pretrained",
    "trainer/sender",
    "trainer/sharded",
    "trainer/ranks",
    "trainer/follower",
    "trainer/observers/tensorboard",
    "engine/",
    "rag/encode",
}


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def name_of(path: Path) -> str:
    return str(path.relative_to(PACKAGE).with_suffix(""))


def imports(path: Path, *, top_level: bool = False) -> Iterator[str]:
    """The modules that a file imports; with `top_level` only what runs when it is imported."""
    tree = ast.parse(path.read_text())
    nodes = _top_level(tree.body) if top_level else ast.walk(tree)
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            whole = [f"{node.module}.{alias.name}" for alias in node.names]
            submodules = [one for one in whole if _file(one) is not None]
            yield from submodules if len(submodules) == len(whole) else [node.module or "", *submodules]


def _file(module: str) -> Path | None:
    """The file of one of our own modules."""
    path = PACKAGE.parent.joinpath(*module.split("."))
    found = (path.with_suffix(".py"), path / "__init__.py")
    return next((one for one in found if one.is_file()), None)


def _top_level(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        yield node


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_arrows(path: Path) -> None:
    room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    for imported in imports(path):
        if not imported.startswith("tidegate."):
            continue
        target = imported.removeprefix("tidegate.")
        if target.split(".")[0] in CORE or target.split(".")[0] == room:
            continue
        if room in ("cli", "launch", "__main__"):
            continue
        assert room in ALLOWED, f"{name_of(path)} is core and imports {imported}"
        allowed = any(target == one or target.startswith(one + ".") for one in ALLOWED[room])
        assert allowed, f"{name_of(path)} may not import {imported}"


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_torch_and_ray_stay_where_they_belong(path: Path) -> None:
    name = name_of(path)
    heavy = {imported.split(".")[0] for imported in imports(path)}
    if "torch" in heavy:
        assert any(name == one or (one.endswith("/") and name.startswith(one)) for one in TORCH), (
            f"{name} imports torch"
        )
    assert "ray" not in heavy or name.startswith("trainer/cluster/")
    assert "peft" not in heavy or name == "trainer/adapter"


def test_no_circles() -> None:
    graph = {}
    for path in modules():
        name = "tidegate." + name_of(path).replace("/", ".").removesuffix(".__init__")
        graph[name] = {one for one in imports(path, top_level=True) if one.startswith("tidegate")}
    seen: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " → ".join([*trail[trail.index(name) :], name])
        if name in seen:
            return
        for one in graph.get(name, ()):
            visit(one, (*trail, name))
        seen.add(name)

    for name in graph:
        visit(name, ())


def test_gateway_agents_and_environments_work_without_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import tidegate.gateway.app, tidegate.agents.solver, tidegate.envs.arithmetic, tidegate.cli"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_help_answers_at_once_and_imports_nothing_heavy() -> None:
    code = (
        "import sys, tidegate.cli\n"
        "try: tidegate.cli.main(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'fastapi', 'openai', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # Of the processor: how long it takes by the clock is the machine's other work, too.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.0
