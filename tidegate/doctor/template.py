"""Checks which continuations of a conversation the chat template extends exactly, and why others are not."""

from __future__ import annotations

from tidegate.doctor.findings import Finding, error, note, ok, warning
from tidegate.gateway.errors import ApiError
from tidegate.gateway.parsing.tool_calls.registry import choose
from tidegate.gateway.rendering.conformance import TOOLS, CaseResult, check_conformance
from tidegate.gateway.rendering.renderer import Renderer
from tidegate.types import Message

QUESTION: list[Message] = [{"role": "user", "content": "What is 2 + 3?"}]


def check_template(renderer: Renderer, tool_parser: str = "auto") -> list[Finding]:
    """Checks the prefix property: new messages can be appended to the sampled ids.

    Without it, the gateway renders every turn completely: correct, but each turn is a separate training
    sequence.
    """
    try:
        first = renderer.encode_prompt(QUESTION, None, {}).tolist()
    except ApiError as failure:
        return [error("template", "template_fails", f"rendering a plain question fails: {failure}")]
    report = check_conformance(renderer)
    tool_format, why = choose(tool_parser, renderer.render_text)
    findings = [ok("template", f"tool-call format {tool_format.name}: {why}")]
    if exact := report.with_verdict("exact"):
        findings.append(ok("template", f"exact: {_kinds(exact)}"))
    if branches := report.with_verdict("branch"):
        text = f"these kinds of turns become branches: {_with_reasons(branches)}"
        findings.append(
            warning("template", "template_branches", text, "use a template that renders replies unchanged")
        )
    if kept := report.with_verdict("prefix_kept"):
        text = f"the gateway keeps the recorded prefix: {_with_reasons(kept)}"
        findings.append(note("template", "template_rewrites", text))
    if refused := report.with_verdict("refused"):
        text = f"the template refuses these histories: {_with_reasons(refused)}"
        findings.append(note("template", "template_refuses", text))
    if not report.escapes_special_tokens:
        text = "control tokens in the text of users and tools are not escaped, so they could end a turn"
        fix = "remove control tokens from the results of your tools"
        findings.append(warning("template", "control_tokens", text, fix))
    if renderer.encode_prompt(QUESTION, TOOLS, {}).tolist() == first:
        text = "the chat template omits tools: the model does not receive their descriptions"
        fix = "describe the tools in a system message, or use a template with tools"
        findings.append(warning("template", "template_without_tools", text, fix))
    return findings


def _kinds(results: list[CaseResult]) -> str:
    return "; ".join(result.kind for result in results)


def _with_reasons(results: list[CaseResult]) -> str:
    """Returns the kinds of results with their reasons, grouped by reason."""
    by_reason: dict[str, list[CaseResult]] = {}
    for result in results:
        by_reason.setdefault(result.reason, []).append(result)
    return "; ".join(f"{_kinds(kinds)} ({why})" for why, kinds in by_reason.items())
