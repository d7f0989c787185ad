"""What is checked of a run before anything of it is started or written, and before torch is imported."""

from __future__ import annotations

import json
import tempfile
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import ProxyHandler, build_opener

from tidegate.errors import ConfigError, StartError

ENGINE_S = 10.0
"""How long a running engine may take to say what it serves."""
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")


def check_engines(urls: Sequence[str]) -> None:
    """Raises StartError for the first of `engine.urls` where no engine answers."""
    if urls:
        with ThreadPoolExecutor(min(16, len(urls))) as threads:
            list(threads.map(_check_engine, urls))


def _check_engine(url: str) -> None:
    address = f"{url}/model_info"
    try:
        with build_opener(ProxyHandler({})).open(address, timeout=ENGINE_S) as response:
            told = json.loads(response.read(1_000_000))
    except HTTPError as error:
        raise _no_engine(url, f"answers GET /model_info with {error.code} {error.reason}") from None
    except (OSError, HTTPException) as error:
        why = getattr(error, "reason", error)
        raise StartError(
            f"engine.urls: no engine answers at {address}: {why or type(error).__name__}; start it first, "
            "and the run when it serves"
        ) from None
    except ValueError:
        raise _no_engine(url, "answers GET /model_info with what is not JSON") from None
    if not isinstance(told, dict) or "weight_version" not in told:
        raise _no_engine(url, "names no weight_version in /model_info")


def _no_engine(url: str, what: str) -> StartError:
    return StartError(
        f"engine.urls: {url} {what}, so it is no engine that can be trained with: that is one of `tidegate "
        "engine`, of `tidegate vllm`, or SGLang"
    )


def check_writable(run_dir: Path) -> None:
    """Raises StartError where the run's directory could not be made or written. Nothing of it is made."""
    there = next(one for one in (run_dir, *run_dir.absolute().parents) if one.exists())
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise StartError(
            f"run.dir = {run_dir.parent}: {run_dir} cannot be written, as {there} refuses it: "
            f"{error.strerror or error}; set run.dir to another directory"
        ) from None


def check_model(run_dir: Path, model: Path, checkpoint: Path | None) -> None:
    """Raises ConfigError where a run that goes on would get another model than the one it began with: its
    weights would be of the one, and its tokens of the other. A model that was moved is known by the tokenizer
    that the newest checkpoint has of it."""
    before = _model_of(run_dir)
    if before is None or before.resolve() == model.resolve():
        return
    if checkpoint is not None and not before.exists() and _same_tokenizer(model, checkpoint):
        return
    raise ConfigError(
        f"model.path = {model}, but the run in {run_dir} began with {before}: leave model.path as it was, or "
        "begin another run with the other model (run.name)"
    )


def _model_of(run_dir: Path) -> Path | None:
    """The `model.path` that the run has kept; None where its settings cannot be read."""
    try:
        kept = tomllib.loads((run_dir / "config.toml").read_text(encoding="utf-8"))
        return Path(kept["model"]["path"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _same_tokenizer(one: Path, other: Path) -> bool:
    files = [(one / name, other / name) for name in TOKENIZER]
    return all(
        mine.is_file() and theirs.is_file() and mine.read_bytes() == theirs.read_bytes()
        for mine, theirs in files
    )
