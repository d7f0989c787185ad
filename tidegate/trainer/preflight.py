"""Checks before a run starts processes, writes files or imports torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from importlib.metadata import distributions
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

from tidegate.config import Settings
from tidegate.envs.base import Environment
from tidegate.errors import ConfigError, StartError
from tidegate.service.api_key import ENGINE_KEY, engine_key
from tidegate.service.http_client import engine_headers
from tidegate.service.serve import Listen, bind
from tidegate.settings.teacher import TeacherSettings

ENGINE_S = 10.0
"""Timeout of an engine's reply to GET /model_info."""
NCCL = "nvidia-nccl-"
"""Begin of the names of the packages with NCCL; torch requires one of them."""
LIST_PACKAGES = (
    "from importlib.metadata import distributions as found; "
    "print(*{f'{one.metadata[\"Name\"]} {one.version}' for one in found()}, sep='\\n')"
)
PYTHON_S = 60.0
"""Time limit of an interpreter that lists its packages."""
CONDITIONAL = "ForConditionalGeneration"
"""End of the names of classes that read images, too."""
TEXT = "language_model."
"""Part of the names of such a class's text model; the class of the text alone has it in files only."""
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")


def check_engines(urls: Sequence[str]) -> None:
    """Raises StartError for the first of `engine.urls` where no engine responds."""
    if urls:
        with ThreadPoolExecutor(min(16, len(urls))) as threads:
            list(threads.map(_check_engine, urls))


def _check_engine(url: str) -> None:
    address = f"{url}/model_info"
    # The variable stays, so that a cluster's processes get it.
    key = os.environ.get(ENGINE_KEY, "").strip() or engine_key()
    request = Request(address, headers=engine_headers(url, key))
    try:
        # Without a proxy, as the run itself calls engines.
        with build_opener(ProxyHandler({})).open(request, timeout=ENGINE_S) as response:
            info = json.loads(response.read(1_000_000))
    except HTTPError as error:
        if error.code == 401:
            raise StartError(
                f"engine.urls: {url} refuses the key of this run (401); give the engine's key in the "
                f"environment variable {ENGINE_KEY}"
            ) from None
        raise _no_engine(url, f"answers GET /model_info with {error.code} {error.reason}") from None
    except (OSError, HTTPException) as error:
        why = getattr(error, "reason", error)
        raise StartError(
            f"engine.urls: no engine answers at {address}: {why or type(error).__name__}; start the engine, "
            "and the run once the engine serves"
        ) from None
    except ValueError:
        raise _no_engine(url, "answers GET /model_info with invalid JSON") from None
    if not isinstance(info, dict) or "weight_version" not in info:
        raise _no_engine(url, "names no weight_version in /model_info")


def _no_engine(url: str, what: str) -> StartError:
    return StartError(
        f"engine.urls: {url} {what}, so a run cannot train with it; use `tidegate engine`, `tidegate vllm` "
        "or SGLang"
    )


def check_nccl(settings: Settings) -> None:
    """Raises ConfigError if trainer and engines cannot form a group over NCCL, which takes one version only.

    Engines in `engine.urls` are not checked: they do not report their version. An interpreter that does not
    run is reported when its engine starts.
    """
    trainer, engine = settings.trainer, settings.engine
    if trainer.publish_transport != "broadcast" or trainer.device == "cpu" or engine.python is None:
        return
    own = _nccl(f"{one.metadata['Name']} {one.version}" for one in distributions())
    try:
        listed = subprocess.run(
            [str(engine.python), "-c", LIST_PACKAGES], capture_output=True, text=True, timeout=PYTHON_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return
    others = _nccl(listed.stdout.splitlines())
    if own and others and own != others:
        package, version = others
        raise ConfigError(
            f'trainer.publish_transport = "broadcast": the trainer has NCCL {own[1]}, and engine.python = '
            f"{engine.python} has {version}; NCCL connects equal versions only. Run {sys.executable} -m pip "
            f'install --no-deps {package}=={version}, or set trainer.publish_transport = "files"'
        )


def set_nccl_memory() -> None:
    """Set NCCL_CUMEM_ENABLE for this process and its children, unless it is set.

    SGLang sets it to 0 for itself, and groups of processes with different values fail in NCCL's transports.
    """
    os.environ.setdefault("NCCL_CUMEM_ENABLE", "0")


def _nccl(packages: Iterable[str]) -> tuple[str, str] | None:
    """Return name and version of the package with NCCL among lines `name version`; None without one."""
    found = sorted(line.strip() for line in packages if line.startswith(NCCL))
    return None if not found else (found[0].split()[0], found[0].split()[1])


def check_architecture(settings: Settings) -> None:
    """Raises StartError if a run's SGLang could not start again from the weights that the trainer writes.

    Transformers may load only the text model of a base with images, in a class that SGLang does not have.
    """
    model, engine = settings.model.path, settings.engine
    given = json.loads((model / "config.json").read_text(encoding="utf-8")).get("architectures") or []
    if engine.kind != "sglang" or engine.urls or not any(name.endswith(CONDITIONAL) for name in given):
        return
    from tidegate.trainer.checkpoint.huggingface import as_in_files, empty_model
    from tidegate.weights.files import stored_names

    try:
        empty = empty_model(model)
    except ValueError:  # reported when the model is loaded
        return
    written = {name.replace(TEXT, "") for name in as_in_files(empty, empty.state_dict())}
    left = sorted(name for name in stored_names(model) if name.replace(TEXT, "") not in written)
    if left and type(empty).__name__ not in given:
        raise StartError(
            f"model.path = {model} is a {given[0]}, of which the trainer loads and writes a "
            f"{type(empty).__name__}, without {len(left)} tensors such as {left[0]}: SGLang could not start "
            'again from these weights. Use engine.kind = "vllm", or the text model alone as model.path'
        )


def check_writable(run_dir: Path) -> None:
    """Raises StartError if the run's directory cannot be created or written. Creates nothing."""
    existing = next(path for path in (run_dir, *run_dir.absolute().parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise StartError(
            f"run.dir = {run_dir.parent}: cannot write {run_dir}: {existing}: {error.strerror or error}; set "
            "run.dir to another directory"
        ) from None


def check_port(host: str, port: int) -> None:
    """Raises StartError if a server could not listen on `port`. Port 0 stands for any free one."""
    if port:
        bind(Listen(host, port), "gateway.port").close()


def check_teachers(teacher: TeacherSettings, environments: Sequence[str]) -> None:
    """Checks that each environment has a teacher, if there are teachers at all.

    Raises:
        ConfigError: A teacher's environment does not exist, or an environment has no teacher.
        StartError: The model of a teacher that the run starts does not exist.
    """
    names = ", ".join(environments)
    for env in teacher.by_env:
        if env not in environments:
            raise ConfigError(
                f"trainer.teacher.by_env.{env}: there is no such environment; the environments are: {names}"
            )
    for env in environments if teacher.enabled else ():
        if env not in teacher.models and "" not in teacher.models:
            raise ConfigError(
                f"the environment {env} has no teacher: set trainer.teacher.by_env.{env}, or url or path of "
                "trainer.teacher for all others"
            )
    for model in teacher.models.values():
        if model.path is not None and not (model.path / "config.json").is_file():
            raise StartError(
                f"trainer.teacher: path = {model.path} has no config.json: it must be a Hugging Face model "
                "directory, such as checkpoints/best of a run"
            )


def check_rewarded_policies(settings: Settings, environment: Environment) -> None:
    """Raises ConfigError if a reward names a policy that the run does not have."""
    for name, part in environment.rewarders().items():
        for reward in part.rewards:
            if reward.policy is not None and reward.policy not in settings.policies:
                policies = ", ".join(settings.policies) or "one without a name"
                raise ConfigError(
                    f"the reward {reward.name!r} of the environment {name!r} is for the policy "
                    f"{reward.policy!r}, and the run has {policies}: name one of these, or none"
                )


def check_model(run_dir: Path, model: Path, checkpoint: Path | None) -> None:
    """Raises ConfigError if a resumed run has another `model.path` than before.

    Its weights would be those of one model, and its tokens those of another. A model that was moved is
    recognised by the tokenizer files in the newest checkpoint.
    """
    before = saved_model_path(run_dir)
    if before is None or before.resolve() == model.resolve():
        return
    if checkpoint is not None and not before.exists() and _same_tokenizer(model, checkpoint):
        return
    raise ConfigError(
        f"model.path = {model}, but the run in {run_dir} began with {before}: restore model.path, or start a "
        "new run with the other model (run.name)"
    )


def check_trained_policies(settings: Settings) -> None:
    """Raises ConfigError if a resumed run trains other policies than before, or from other models.

    Its checkpoint lacks those that are new, and the groups that continue have turns of those that are gone.
    """
    try:
        text = (settings.run_dir / "config.toml").read_text(encoding="utf-8")
        values = tomllib.loads(text)
        saved = values.get("policies", {})
        trained = [name for name, own in saved.items() if own.get("train", True) and "earlier" not in own]
        paths = {name: Path(saved[name].get("path", values["model"]["path"])) for name in trained}
    except (OSError, ValueError, TypeError, AttributeError, KeyError):
        return
    before, now = sorted(trained) or [""], sorted(settings.trained_policies)
    if before != now:
        one = "one policy without a name"
        raise ConfigError(
            f"the run in {settings.run_dir} trains {', '.join(before) or one}, not {', '.join(now) or one}: "
            "restore the policies, or start a new run with these (run.name)"
        )
    for name, path in paths.items():
        model = settings.of_policy(name).model.path
        if path.exists() and path.resolve() != model.resolve():
            raise ConfigError(
                f"policies.{name}.path = {model}, but the run in {settings.run_dir} began with {path}: "
                "restore it, or start a new run with the other model (run.name)"
            )


def saved_model_path(run_dir: Path) -> Path | None:
    """Return the `model.path` of the run's saved settings; None if they cannot be read."""
    try:
        saved = tomllib.loads((run_dir / "config.toml").read_text(encoding="utf-8"))
        return Path(saved["model"]["path"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _same_tokenizer(model: Path, checkpoint: Path) -> bool:
    files = [(model / name, checkpoint / name) for name in TOKENIZER]
    return all(
        ours.is_file() and saved.is_file() and ours.read_bytes() == saved.read_bytes()
        for ours, saved in files
    )
