"""Checks which continuations of a conversation the chat template extends exactly, and why others are not."""

from __future__ import annotations

from tidegate.doctor.findings import Finding, error, note, ok, warning
from tidegate.gateway.errors import ApiError
from tidegate.gateway.parsing.tool_calls.registry import choose
from tidegate.gateway.rendering.conformance import CaseResult, check_conformance
from tidegate.gateway.rendering.renderer import Renderer
from tidegate.types import Message

ASKED: list[Message] = [{"role": "user", "content": "What is 2 + 3?"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Work out an expression.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
    },
}


def check_template(renderer: Renderer, tool_parser: str = "auto") -> list[Finding]:
    """The prefix property: what follows a reply is put after the ids that were sampled.

    Where a template can't do that, the gateway renders every turn whole: correct, but a sequence of its
    own, trained at its own cost.
    """
    try:
        first = renderer.encode_prompt(ASKED, None, {}).tolist()
    except ApiError as failure:
        return [error("template", "template_fails", f"it fails on a plain question: {failure}")]
    certificate = check_conformance(renderer)
    form, why = choose(tool_parser, renderer.render_text)
    found = [ok("template", f"tool calls are read as {form.name}: {why}")]
    if exact := certificate.with_verdict("exact"):
        found.append(ok("template", f"exact: {_kinds(exact)}"))
    if branches := certificate.with_verdict("branch"):
        found.append(
            warning(
                "template",
                "template_branches",
                f"every such turn becomes a branch: {_told(branches)}",
                "give the model a template that writes replies as they are",
            )
        )
    if kept := certificate.with_verdict("prefix_kept"):
        found.append(
            note("template", "template_rewrites", f"the gateway keeps what was recorded: {_told(kept)}")
        )
    if refused := certificate.with_verdict("refused"):
        found.append(note("template", "template_refuses", f"it takes no such history: {_told(refused)}"))
    if not certificate.escapes_special_tokens:
        found.append(
            warning(
                "template",
                "control_tokens",
                "what users and tools write as control tokens becomes control tokens: they could end a turn",
                "take them out of what your tools return",
            )
        )
    if renderer.encode_prompt(ASKED, [TOOL], {}).tolist() == first:
        found.append(
            warning(
                "template",
                "template_without_tools",
                "the chat template leaves tools out: the model never hears of them",
                "describe the tools in a system message, or use a template with tools",
            )
        )
    return found


def _kinds(judgements: list[CaseResult]) -> str:
    return ", ".join(one.kind for one in judgements)


def _told(judgements: list[CaseResult]) -> str:
    """Kinds with their reasons, those with one reason together."""
    by_reason: dict[str, list[CaseResult]] = {}
    for one in judgements:
        by_reason.setdefault(one.reason, []).append(one)
    return "; ".join(f"{_kinds(kinds)} ({why})" for why, kinds in by_reason.items())
