"""Rendering in the gateway: log lines at its start, counters, and detection of planted drift."""

from __future__ import annotations

import itertools
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.fakes import Stage, staged
from tests.families import FAMILIES, family_tokenizer
from tests.tiny_tokenizer import make_model_dir
from tidegate.gateway.sessions.tree import TurnTree, prefix_mismatch
from tidegate.turn import Ids, Turn

ASK: list[Any] = [{"role": "user", "content": "1+2?"}]
MORE: dict[str, Any] = {"role": "user", "content": "And 4 + 4?"}


def family_dir(directory: Path, name: str) -> Path:
    make_model_dir(directory)
    family_tokenizer(name, "tiny").save_pretrained(str(directory))
    stops = [family_tokenizer(name, "tiny").convert_tokens_to_ids(stop) for stop in FAMILIES[name].stops]
    (directory / "generation_config.json").write_text(f'{{"eos_token_id": {stops}}}')
    return directory


async def converse(stage: Stage, turns: int) -> list[list[int]]:
    """The prompts of one conversation, after each of which stands what the engine sampled."""
    access = await stage.client.open_session(env="sums")
    llm = await stage.llm(access)
    messages = list(ASK)
    prompts: list[list[int]] = []
    for _ in range(turns):
        said = stage.say("It is 3.")
        reply = await llm.chat.completions.create(model="m", messages=messages)
        prompts.append([*stage.engine.requests[-1]["input_ids"], *said])
        messages += [{"role": "assistant", "content": reply.choices[0].message.content}, MORE]
    return prompts


@pytest.mark.parametrize("name", ["llama3", "mistral_v3", "gemma", "phi3", "deepseek_r1", "glm4", "gpt_oss"])
async def test_a_conversation_extends_the_recorded_ids(name: str, tmp_path: Path) -> None:
    async with staged(family_dir(tmp_path / name, name)) as stage:
        prompts = await converse(stage, 3)
        for earlier, later in itertools.pairwise(prompts):
            assert later[: len(earlier)] == earlier
        metrics = stage.gateway.metrics
        assert (metrics.drifted_turns, metrics.rerendered_tokens, sum(metrics.branches.values())) == (0, 0, 0)


async def test_the_certificate_is_one_line_of_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "tidegate.gateway"):
        async with staged(make_model_dir(tmp_path / "tiny", "qwen3")):
            pass
    [line] = [one.message for one in caplog.records if one.message.startswith("chat template:")]
    assert line == "chat template: 14 of 15 kinds of continuations are exact; prefix_kept: after reasoning"


async def test_branches_cost_tokens_that_are_counted(tmp_path: Path) -> None:
    async with staged(make_model_dir(tmp_path / "tiny", "shouting")) as stage:
        await converse(stage, 3)
        text = await stage.client.metrics()
        assert stage.gateway.metrics.rerendered_tokens > 0
        assert 'branches_total{reason="template"} 2' in text
        assert "drifted_turns_total 0" in text
        assert f"rerendered_tokens_total {stage.gateway.metrics.rerendered_tokens}" in text


async def test_a_prompt_that_drifts_is_counted_and_recorded_as_a_branch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with staged(make_model_dir(tmp_path / "tiny")) as stage:
        honest = TurnTree.prompt

        def skewed(tree: TurnTree, parent: int | None, delta: Ids) -> Ids:
            prompt = honest(tree, parent, delta)
            return prompt if parent is None else np.concatenate((prompt[1:2], prompt[1:]))

        monkeypatch.setattr(TurnTree, "prompt", skewed)
        access = await stage.client.open_session(env="sums")
        llm = await stage.llm(access)
        said = stage.say("3")
        reply = await llm.chat.completions.create(model="m", messages=ASK)
        message = {"role": "assistant", "content": reply.choices[0].message.content}
        stage.say("8")
        await llm.chat.completions.create(model="m", messages=[*ASK, message, MORE])
        assert "drifted_turns_total 1" in await stage.client.metrics()
        [session] = stage.gateway.sessions.all()
        [first, second] = session.tree.turns()
        assert first.output_ids.tolist() == said
        assert second.parent is None
        assert second.branch is not None
        assert second.branch.startswith("drift:")
        assert second.delta_ids.tolist() == stage.engine.requests[-1]["input_ids"]


def turn(delta: list[int], output: list[int], parent: int | None) -> Turn:
    made = Turn.__new__(Turn)
    made.delta_ids, made.output_ids = np.asarray(delta, np.int32), np.asarray(output, np.int32)
    made.parent = parent
    return made


@pytest.mark.parametrize(
    ("prompt", "parent", "drifted"),
    [
        ([1, 2, 3, 9], None, False),
        ([7, 2, 3, 9], None, True),
        ([1, 2, 4, 9], None, True),
        ([0, 1, 2, 3, 9], None, True),
        ([0, 1, 2, 3, 9], 0, False),
        ([2, 3, 9], 0, True),
    ],
)
def test_drift_is_any_other_id_and_any_other_length(
    prompt: list[int], parent: int | None, drifted: bool
) -> None:
    assert prefix_mismatch(np.asarray(prompt, np.int32), turn([1, 2], [3], parent), 1) == drifted
