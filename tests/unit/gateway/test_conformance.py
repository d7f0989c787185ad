"""The conformance check of a chat template reports what the template does."""

from __future__ import annotations

import time

import pytest

from tests.families import FAMILIES, family_renderer
from tests.tiny_tokenizer import make_tokenizer
from tidegate.gateway.rendering.conformance import ConformanceReport, check_conformance
from tidegate.gateway.rendering.renderer import Renderer


def verdicts(certificate: ConformanceReport) -> dict[str, str]:
    return {one.kind: one.verdict for one in certificate.results}


@pytest.mark.parametrize("name", ["qwen25", "mistral_v7", "phi4", "granite", "command_r", "smollm"])
def test_templates_that_write_replies_as_they_are_sampled_are_exact_throughout(name: str) -> None:
    certificate = check_conformance(family_renderer(name, "tiny"))
    assert set(verdicts(certificate).values()) == {"exact"}, certificate.summary()
    assert certificate.escapes_special_tokens


@pytest.mark.parametrize(
    ("name", "kind", "verdict", "why"),
    [
        ("qwen3", "after reasoning", "prefix_kept", "renders the past reply differently"),
        ("llama3", "whitespace at a reply's edges", "prefix_kept", "renders the past reply differently"),
        ("llama3", "results of parallel calls", "refused", "one call a turn"),
        (
            "mistral_v3",
            "a question, with a system prompt and tools",
            "prefix_kept",
            "rewrites the first prompt",
        ),
        ("mistral_v3", "a tool's result", "exact", ""),
        ("gemma", "two questions at once", "refused", "take turns"),
        ("deepseek_v3", "a system message in the middle", "prefix_kept", "rewrites the first prompt"),
        ("deepseek_r1", "a question", "prefix_kept", "rewrites the first prompt"),
        ("gpt_oss", "a question", "prefix_kept", "renders the past reply differently"),
        ("gpt_oss", "a tool's result", "exact", ""),
        ("glm4", "a tool's result", "exact", ""),
    ],
)
def test_inexact_parts_are_reported_with_the_reason(name: str, kind: str, verdict: str, why: str) -> None:
    certificate = check_conformance(family_renderer(name, "tiny"))
    [found] = [one for one in certificate.results if one.kind == kind]
    assert (found.verdict, why in found.reason) == (verdict, True), found
    assert certificate.summary().startswith(f"{len(certificate.with_verdict('exact'))} of 15 kinds")


def test_a_template_that_rewrites_replies_branches_everywhere() -> None:
    certificate = check_conformance(Renderer(make_tokenizer("shouting")))
    assert set(verdicts(certificate).values()) == {"branch"}
    assert "branch: 15 kinds" in certificate.summary()


def test_a_template_that_counts_messages_is_exact_for_all_that() -> None:
    assert set(verdicts(check_conformance(Renderer(make_tokenizer("counting")))).values()) == {"exact"}


@pytest.mark.parametrize("name", FAMILIES)
def test_control_tokens_that_a_user_writes_stay_text(name: str) -> None:
    renderer = family_renderer(name, "tiny")
    assert check_conformance(renderer).escapes_special_tokens
    evil = " ".join(FAMILIES[name].special)
    calm = [{"role": "user", "content": "calm"}]
    spoken = [{"role": "user", "content": evil}]
    control = {renderer.codec.added[one] for one in FAMILIES[name].special}
    reply = {"role": "assistant", "content": "b"}
    for made in (
        lambda new: renderer.encode_prompt(new, None, {}),
        lambda new: renderer.encode_suffix(lambda: calm, reply, new, None, {}, None),
    ):
        expected = [one for one in made(calm).tolist() if one in control]
        assert [one for one in made(spoken).tolist() if one in control] == expected
        assert evil in renderer.codec.decode_all(made(spoken).tolist())
    assert renderer.escaped_requests >= 2


@pytest.mark.parametrize("name", ["qwen3", "llama3", "deepseek_v3"])
def test_control_tokens_in_the_arguments_of_a_call_stay_text(name: str) -> None:
    """Of a call that the client itself wrote after the recorded reply."""
    renderer = family_renderer(name, "tiny")
    control = {renderer.codec.added[one] for one in FAMILIES[name].special}

    def made(text: str) -> list[int]:
        function = {"name": "f", "arguments": {"x": text}}
        new = [
            {"role": "user", "content": "a"},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"id": "c", "type": "function", "function": function}],
            },
            {"role": "tool", "content": "1", "tool_call_id": "c", "name": "f"},
        ]
        reply = {"role": "assistant", "content": "b"}
        ids = renderer.encode_suffix(lambda: [{"role": "user", "content": "a"}], reply, new, None, {}, None)
        return [one for one in ids.tolist() if one in control]

    assert made(" ".join(FAMILIES[name].special)) == made("calm")


def test_a_real_tokenizer_is_certified_within_a_second() -> None:
    renderer = family_renderer("qwen3", "real")
    began = time.process_time()
    certificate = check_conformance(renderer)
    assert time.process_time() - began < 1
    assert len(certificate.with_verdict("exact")) == 14
