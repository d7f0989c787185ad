"""Allowed imports between packages, import cycles, and where heavy libraries may be imported."""

from __future__ import annotations

import ast
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from tests import REPO

PACKAGE = REPO / "tidegate"
CORE = {
    "__init__",
    "config",
    "devices",
    "errors",
    "failpoints",
    "loading",
    "observer",
    "program",
    "progress",
    "sequences",
    "prometheus",
    "sandbox",
    "service",
    "settings",
    "tracebacks",
    "turn",
    "types",
    "weights",
}
ALLOWED = {
    "settings": {"gateway.parsing.tool_calls.registry"},
    "gateway": set(),
    "engine": set(),
    "agents": {"rag.client", "envs.adapters.library", "envs.adapters.verifiers_rows"},
    "rag": set(),
    "viewer": {
        "evaluation.stats",
        "trainer.checkpoint.checkpoint",
        "trainer.ledger.entries",
        "trainer.ledger.jsonl",
        "trainer.ledger.state",
        "trainer.ledger.versions",
    },
    "plan": {
        "doctor.model",
        "engine.options",
        "trainer.cluster.placement",
        "trainer.forecast",
        "trainer.preflight",
        "trainer.processes.gpus",
        "trainer.processes.servers",
    },
    "scaffold": set(),
    "vllm": {
        "engine.validation",
        "engine.server.adapter",
        "engine.server.http",
        "engine.requests.params",
        "engine.requests.request",
        "engine.requests.detokenizer",
    },
    "tinker": {
        "engine.validation",
        "engine.server.adapter",
        "engine.server.http",
        "engine.requests.params",
        "engine.requests.request",
        "engine.requests.detokenizer",
        "trainer.batch.rows",
        "trainer.checkpoint.checkpoint",
        "trainer.checkpoint.huggingface",
        "trainer.policy.diagnostics",
        "trainer.policy.optimizer",
        "trainer.records.formats",
        "vllm.model",
    },
    "simulation": {
        "gateway.engines.engine",
        "trainer.admission.core",
        "trainer.ledger.entries",
        "trainer.admission.state",
        "trainer.ledger.state",
        "trainer.records.metrics",
        "trainer.records.trajectories",
        "trainer.admission.rules",
    },
    "doctor": {
        "agents.base",
        "envs.base",
        "envs.judge.judge",
        "envs.service.episodes",
        "envs.service.scoring",
        "gateway.rendering.conformance",
        "gateway.client",
        "gateway.engines.protocol",
        "gateway.errors",
        "gateway.rendering.renderer",
        "gateway.parsing.tool_calls",
        "trainer.forecast",
        "trainer.processes.servers",
        "trainer.processes.launcher",
        "trainer.processes.agents",
        "trainer.processes.provider",
        "trainer.processes.supervisor",
        "trainer.publish.engine_control",
        "trainer.rollout.episodes",
    },
    "evaluation": {
        "envs.base",
        "envs.judge.judge",
        "envs.service.scoring",
        "trainer.checkpoint.checkpoint",
        "trainer.records.judge",
        "gateway.environments.client",
        "gateway.groups.rewards",
        "trainer.processes.supervisor",
        "trainer.processes.servers",
        "trainer.preflight",
        "trainer.processes.launcher",
        "trainer.rollout.episodes",
        "trainer.records.trajectories",
        "trainer.processes.agents",
        "trainer.processes.provider",
        "trainer.waits",
    },
    "sft": {
        "gateway.errors",
        "gateway.rendering.messages",
        "gateway.rendering.renderer",
        "trainer.batch.rows",
        "trainer.checkpoint.checkpoint",
        "trainer.distributed.ranks",
        "trainer.policy.policy",
        "trainer.preflight",
        "trainer.processes.rank_process",
        "trainer.processes.supervisor",
        "trainer.records",
        "trainer.start",
    },
    "envs": {"rag.client", "sandbox"},
    "trainer": {"envs.base", "envs.judge.cache", "agents.base", "gateway.client", "tinker"},
}
TORCH = {
    "weights/float_logits",
    "weights/onednn",
    "weights/gguf",
    "weights/process_group",
    "devices",
    "trainer/policy/attention",
    "trainer/policy/routing",
    "trainer/policy/policy",
    "trainer/policy/state",
    "trainer/losses/",
    "trainer/policy/diagnostics",
    "trainer/batch/microbatch",
    "trainer/policy/lora",
    "trainer/policy/forward",
    "trainer/policy/head",
    "trainer/policy/optimizer",
    "trainer/policy/working_copy",
    "trainer/policy/activation_checkpointing",
    "trainer/publish/publisher",
    "trainer/checkpoint/checkpoint",
    "trainer/checkpoint/huggingface",
    "trainer/checkpoint/shards",
    "trainer/publish/broadcast",
    "trainer/publish/version_writer",
    "trainer/distributed/fsdp",
    "trainer/policy/ranks",
    "trainer/policy/gradient",
    "trainer/distributed/ranks",
    "trainer/distributed/rank_main",
    "trainer/loggers/tensorboard",
    "engine/",
    "rag/encoders",
}


@cache
def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def name_of(path: Path) -> str:
    return str(path.relative_to(PACKAGE).with_suffix(""))


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imports(path: Path, *, top_level: bool = False) -> list[str]:
    """The modules that a file imports; with `top_level` only what runs when it is imported."""
    return list(_imports(path, top_level))


def _imports(path: Path, top_level: bool) -> Iterator[str]:
    tree = parsed(path)
    nodes = _top_level(tree.body) if top_level else ast.walk(tree)
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            whole = [f"{node.module}.{alias.name}" for alias in node.names]
            submodules = [one for one in whole if _file(one) is not None]
            yield from submodules if len(submodules) == len(whole) else [node.module or "", *submodules]


@cache
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


def test_allowed_imports() -> None:
    wrong = [what for path in modules() for what in _forbidden(path)]
    assert not wrong, "\n".join(wrong)


def _forbidden(path: Path) -> Iterator[str]:
    room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    for imported in imports(path):
        if not imported.startswith("tidegate."):
            continue
        target = imported.removeprefix("tidegate.")
        if target.split(".")[0] in CORE or target.split(".")[0] == room:
            continue
        if room in ("cli", "launch", "__main__"):
            continue
        if room not in ALLOWED:
            yield f"{name_of(path)} is core and imports {imported}"
        elif not any(target == one or target.startswith(one + ".") for one in ALLOWED[room]):
            yield f"{name_of(path)} may not import {imported}"


def test_torch_and_ray_stay_where_they_belong() -> None:
    wrong = [what for path in modules() for what in _misplaced(path)]
    assert not wrong, "\n".join(wrong)


def _misplaced(path: Path) -> Iterator[str]:
    name = name_of(path)
    heavy = {imported.split(".")[0] for imported in imports(path)}
    in_torch = any(name == one or (one.endswith("/") and name.startswith(one)) for one in TORCH)
    if "torch" in heavy and not in_torch:
        yield f"{name} imports torch"
    if "ray" in heavy and not name.startswith("trainer/cluster/"):
        yield f"{name} imports ray"
    if "peft" in heavy and name != "trainer/policy/lora":
        yield f"{name} imports peft"


def test_a_service_that_trains_is_named_in_its_folder_in_settings_and_in_the_registry_alone() -> None:
    formats = ("cli/export", "trainer/records/formats")
    allowed = ("tinker/", "settings/", "config", "trainer/backends", "cli/tinker", "cli/__init__", *formats)
    named = {name_of(path) for path in modules() if "tinker" in path.read_text(encoding="utf-8").lower()}
    assert not sorted(name for name in named if not name.startswith(allowed))
    importing = {name_of(path) for path in modules() if "tinker" in imports(path)}
    assert importing == {"tinker/service"}


def graph_of(group: Callable[[Path], str]) -> dict[str, set[str]]:
    """Who imports whom, type checking and functions included, with the files grouped as given."""
    graph: dict[str, set[str]] = {}
    for path in modules():
        node = group(path)
        targets = graph.setdefault(node, set())
        for imported in imports(path):
            file = _file(imported)
            if file is not None and imported != "tidegate":  # the package itself holds its version alone
                targets.add(group(file))
        targets.discard(node)
    return graph


def folder_or_file(path: Path) -> str:
    """A folder that has no folders in it; of others each file by itself."""
    leaf = not any(child.is_dir() and any(child.glob("*.py")) for child in path.parent.iterdir())
    return name_of(path.parent if leaf else path)


@pytest.mark.parametrize("group", [name_of, folder_or_file])
def test_no_import_cycles(group: Callable[[Path], str]) -> None:
    graph = graph_of(group)
    seen: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " → ".join([*trail[trail.index(name) :], name])
        if name in seen:
            return
        for target in graph[name]:
            visit(target, (*trail, name))
        seen.add(name)

    for name in graph:
        visit(name, ())


def test_a_public_class_has_a_name_of_its_own() -> None:
    places: dict[str, list[str]] = {}
    for path in modules():
        for node in parsed(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(name_of(path))
    shared = {name: where for name, where in places.items() if len(where) > 1}
    assert not shared, shared


def test_at_most_eight_arguments_are_given_by_position() -> None:
    found = []
    for path in modules():
        for node in ast.walk(parsed(path)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                names = [one.arg for one in node.args.posonlyargs + node.args.args]
                number = len([name for name in names if name not in ("self", "cls")])
            elif isinstance(node, ast.ClassDef) and any(
                "dataclass" in ast.unparse(one) for one in node.decorator_list
            ):
                number = positional_fields(node)
            else:
                continue
            if number > 8:
                found.append(f"{path.relative_to(REPO)}: {node.name} takes {number}")
    assert not found


def positional_fields(node: ast.ClassDef) -> int:
    """Number of a dataclass's own fields that may be given by position."""
    if any("kw_only=True" in ast.unparse(one) for one in node.decorator_list):
        return 0
    number = 0
    for field in node.body:
        if isinstance(field, ast.AnnAssign):
            text = ast.unparse(field)
            if "KW_ONLY" in text:
                break
            number += "ClassVar" not in text and "init=False" not in text
    return number


def test_gateway_agents_and_environments_work_without_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import tidegate.gateway.http.app, tidegate.agents.solver, tidegate.cli\n"
        "import tidegate.evaluation.evaluate\n"
        "assert 'mcp' not in sys.modules, 'it is imported at the first MCP request'\n"
        "assert tidegate.cli.main(['eval', '--env.use', 'arithmetic', '--gold']) == 0"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_workers_clients_and_environments_need_no_extra() -> None:
    extra = ("torch", "safetensors", "transformers", "tokenizers", "matplotlib", "mcp", "uvloop", "zstandard")
    modules = (
        "agents.attempt_runner, agents.solver, agents.chat, agents.command, cli.worker, client, "
        "envs.service.server, envs.arithmetic, gateway.client, viewer.dashboard.app, viewer.live, "
        "viewer.report, trainer.ledger.state, evaluation.stats"
    )
    code = f"import sys\nfor name in {extra}: sys.modules[name] = None\n" + "\n".join(
        f"import tidegate.{module}" for module in modules.split(", ")
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_settings_import_nothing_heavy() -> None:
    code = (
        "import sys, tidegate.config\n"
        "heavy = {'torch', 'transformers', 'fastapi', 'openai', 'numpy', 'aiohttp'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_help_answers_at_once_and_imports_nothing_heavy() -> None:
    code = (
        "import sys, tidegate.cli\n"
        "try: tidegate.cli.main(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'fastapi', 'openai', 'numpy', 'mcp'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # Of the processor: how long it takes by the clock is the machine's other work, too.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.0
