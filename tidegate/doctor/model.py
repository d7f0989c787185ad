"""Checks that the model directory is complete and usable."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tidegate.config import Settings
from tidegate.doctor.findings import Finding, error, ok
from tidegate.errors import StartError
from tidegate.weights.files import find_quantization, stored_parameters

if TYPE_CHECKING:
    from tidegate.gateway.rendering.renderer import Renderer

MOST_PADDING = 1024
"""Rows of an embedding beyond the tokenizer's ids: published models round the number up by less."""


def check_model(settings: Settings) -> tuple[list[Finding], Renderer | None]:
    """Checks the directory, its tokenizer and its template; returns the renderer if it can be loaded."""
    model = settings.model.path
    from tidegate.doctor.template import check_template
    from tidegate.gateway.rendering.renderer import Renderer

    findings = _files(model)
    if findings:
        return findings, None
    if not has_template(model):
        text = f"the model directory {model} has no chat template"
        fix = "use the chat (instruct) model, or add a chat_template.jinja"
        return [error("model", "no_chat_template", text, fix)], None
    try:
        renderer = Renderer.load(model)
    except StartError as failure:
        return [error("model", "tokenizer_unreadable", str(failure))], None
    findings = _tokenizer(renderer, model) or [ok("model", f"{model}: weights, tokenizer and chat template")]
    return [*findings, *check_template(renderer, settings.gateway.tool_parser)], renderer


def refuse_incomplete(model: Path, *, weights: bool = True) -> None:
    """Raises StartError or WeightsError if a model directory lacks files; imports no tokenizer.

    Without `weights` it may lack them: a service has its own.
    """
    for finding in _files(model, weights):
        raise StartError(f"{finding.text}; {finding.fix}")
    stored_parameters(model)


def refuse_unusable(model: Path, *, weights: bool = True) -> None:
    """Raises StartError or WeightsError if a model directory, its tokenizer or template cannot be used."""
    from tidegate.gateway.rendering.renderer import Renderer

    refuse_incomplete(model, weights=weights)
    for finding in _tokenizer(Renderer.load(model), model):
        raise StartError(f"{finding.text}; {finding.fix}")


def _files(model: Path, weights: bool = True) -> list[Finding]:
    fix = (
        "model.path is a directory in Hugging Face format, relative to the current directory; tidegate "
        "convert makes one from a GGUF file or a model on the Hugging Face hub"
    )
    if not model.exists() and len(model.parts) == 2 and not model.is_absolute():  # an id on the hub, perhaps
        fix = f"to fetch it from the hub: tidegate convert {model} --out models/{model.name}, and set it"
    if model.is_file():
        return [error("model", "no_model", f"model.path = {model} is a file", fix)]
    if not model.is_dir():
        return [error("model", "no_model", f"model.path = {model}: there is no such directory", fix)]
    findings = [
        error("model", "model_incomplete", f"the model directory {model} has no {name}", fix)
        for name in ("config.json", "tokenizer_config.json")
        if not (model / name).is_file()
    ]
    if weights and not any(model.glob("*.safetensors")) and not any(model.glob("*.bin")):
        findings.append(
            error("model", "model_incomplete", f"the model directory {model} has no weights", fix)
        )
    if weights and (quantization := find_quantization(model)):
        text = f"{quantization} and cannot be trained"
        findings.append(error("model", "model_quantized", text, "set model.path to the model in bfloat16"))
    return findings


def has_template(model: Path) -> bool:
    """Returns whether a model directory has a chat template, in any of the supported files."""
    if any((model / name).is_file() for name in ("chat_template.jinja", "chat_template.json")):
        return True
    return bool(_read(model / "tokenizer_config.json").get("chat_template"))


def _read(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _tokenizer(renderer: Renderer, model: Path) -> list[Finding]:
    findings = []
    if not renderer.stop_ids:
        text = f"{model}: no token ends a reply, so every reply would have max_tokens tokens"
        findings.append(error("model", "no_end_of_turn", text, "set eos_token_id in generation_config.json"))
    config = _read(model / "config.json")
    rows = (config.get("text_config") or config).get("vocab_size")
    tokens = 1 + max(renderer.codec.tokenizer.get_vocab().values())
    if isinstance(rows, int) and not 0 <= rows - tokens <= MOST_PADDING:
        text = f"{model}: its tokenizer has {tokens:,} ids, its embedding {rows:,} rows"
        fix = "use the tokenizer and weights of the same model"
        findings.append(error("model", "vocabulary", text, fix))
    return findings
