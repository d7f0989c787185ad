"""Is the model directory whole, and does its chat template let a conversation grow?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tidegate.config import Settings
from tidegate.doctor.findings import Finding, error, note, ok, warning
from tidegate.errors import StartError
from tidegate.gateway.refusal import Refusal
from tidegate.gateway.render import Renderer, Unrenderable
from tidegate.types import Message

ASKED: list[Message] = [{"role": "user", "content": "What is 2 + 3?"}]
REPLIES = ("It is 5.", "<think>\nTwo and three.\n</think>\n\nIt is 5.")
AGAIN: list[Message] = [{"role": "user", "content": "And 4 + 4?"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Work out an expression.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
    },
}


def check_model(settings: Settings) -> tuple[list[Finding], Renderer | None]:
    """The directory, its tokenizer and its template; the renderer where there can be one."""
    model = settings.model.path
    found = list(_files(model))
    if found:
        return found, None
    if not has_template(model):
        return [
            error(
                "model",
                "no_chat_template",
                f"the model directory {model} has no chat template",
                "use the chat (instruct) model, or put a chat_template.jinja there",
            )
        ], None
    try:
        renderer = Renderer.load(model)
    except StartError as failure:
        return [error("model", "tokenizer_unreadable", str(failure))], None
    found = [*_tokenizer(renderer, model), *check_template(renderer)]
    return found or [
        ok("model", f"{model}: tokenizer, and a template whose turns extend each other")
    ], renderer


def _files(model: Path) -> list[Finding]:
    fix = "model.path is a directory in Hugging Face format; paths are relative to where this is started"
    if not model.is_dir():
        return [error("model", "no_model", f"model.path = {model}: there is no such directory", fix)]
    found = [
        error("model", "model_incomplete", f"the model directory {model} has no {name}", fix)
        for name in ("config.json", "tokenizer_config.json")
        if not (model / name).is_file()
    ]
    if not any(model.glob("*.safetensors")) and not any(model.glob("*.bin")):
        found.append(error("model", "model_incomplete", f"the model directory {model} has no weights", fix))
    return found


def has_template(model: Path) -> bool:
    """Whether a model directory has a chat template, in any of the places where there may be one."""
    if any((model / name).is_file() for name in ("chat_template.jinja", "chat_template.json")):
        return True
    return bool(_read(model / "tokenizer_config.json").get("chat_template"))


def _read(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _tokenizer(renderer: Renderer, model: Path) -> list[Finding]:
    found = []
    if not renderer.stop_ids:
        found.append(
            error(
                "model",
                "no_end_of_turn",
                f"{model}: no token ends a reply, so all of them would run to max_tokens",
                "set eos_token_id in generation_config.json",
            )
        )
    config = _read(model / "config.json")
    size = (config.get("text_config") or config).get("vocab_size")
    highest = max([*renderer.encode("What is 2 + 3?"), *renderer.stop_ids])
    if isinstance(size, int) and highest >= size:
        found.append(
            error(
                "model",
                "vocabulary",
                f"{model}: its tokenizer gives the id {highest}, and its weights have {size} tokens",
                "tokenizer and weights are of different models",
            )
        )
    return found


def check_template(renderer: Renderer) -> list[Finding]:
    """The prefix property: what follows a reply is put after the ids that were sampled.

    Where a template can't do that, the gateway renders every turn whole: correct, but a sequence of its
    own, trained at its own cost.
    """
    try:
        first = renderer.root(ASKED, None, {}).tolist()
    except Refusal as failure:
        return [error("model", "template_fails", f"the chat template fails on a plain question: {failure}")]
    found = []
    try:
        kept = [_extends(renderer, first, reply) for reply in REPLIES]
    except Unrenderable as failure:
        return [
            warning(
                "model",
                "template_branches",
                "the chat template gives no text of its own for what follows a reply, so every turn becomes "
                f"a branch: {failure}",
                "give the model a template that writes replies as they are",
            )
        ]
    if not all(kept):
        found.append(
            note(
                "model",
                "template_rewrites",
                "the chat template writes past replies in another way than they are sampled (it takes "
                "reasoning out, say); the gateway keeps what was sampled",
            )
        )
    if renderer.root(ASKED, [TOOL], {}).tolist() == first:
        found.append(
            warning(
                "model",
                "template_without_tools",
                "the chat template leaves tools out: the model never hears of them",
                "describe the tools in a system message, or use a template with tools",
            )
        )
    return found


def _extends(renderer: Renderer, first: list[int], reply: str) -> bool:
    """Whether the whole history, rendered anew, is what was recorded with what follows put after it."""
    message: Message = {"role": "assistant", "content": reply}
    recorded = [*first, *renderer.encode(reply), *renderer.closing_ids[:1]]
    added = renderer.follow_up(lambda: ASKED, message, AGAIN, None, {}, recorded[-1]).tolist()
    whole = renderer.root([*ASKED, message, *AGAIN], None, {}).tolist()
    return bool(whole == recorded + added)
