"""Episodes as rows of other trainers, and as ATIF documents.

Field names are those of the libraries' own types: Tinker's `Datum` (SDK 0.38), the columns that a rollout
function of TRL's GRPOTrainer returns (1.16), verl's `AgentLoopOutput` (0.9.1), prime-rl's `TrainingSample`
(0.8), and the `Trajectory` of ATIF-v1.7 (Harbor 0.26).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

import numpy as np

from tidegate import __version__
from tidegate.trainer.batch.rows import TrainingSequence
from tidegate.trainer.records.trajectories import decode_trajectory
from tidegate.turn import Turn
from tidegate.types import Trajectory

Line = Mapping[str, Any]
Rows = Iterator[dict[str, Any]]


class Format(NamedTuple):
    """A format, and the recorded values that it has no place for."""

    rows: Callable[[Line, Sequence[TrainingSequence]], Rows]
    """From a line of `trajectories/` and its token sequences."""
    lacks: str
    batches_only: bool = True
    """Whether it has the episodes of batches only."""


def first_sampled(row: TrainingSequence) -> int:
    """Returns the index of the first sampled token; before it is the prompt, from it on the completion."""
    sampled = np.flatnonzero(row.mask | (row.logprobs != 0))
    return int(sampled[0]) if len(sampled) else len(row.ids) - 1


def trl_row(row: TrainingSequence, reward: float) -> dict[str, Any]:
    """Returns the columns of a rollout function of TRL's GRPOTrainer for a token sequence.

    All but the first four are passed to the reward functions.
    """
    start = first_sampled(row)
    return {
        "prompt_ids": row.ids[:start].tolist(),
        "completion_ids": row.ids[start:].tolist(),
        "logprobs": row.logprobs[start:].tolist(),
        "env_mask": row.mask[start:].astype(int).tolist(),
        "reward": reward,
        "versions": row.versions[start:].tolist(),
        "group_id": row.group_id,
        "session_id": row.session_id,
    }


def _trl(line: Line, sequences: Sequence[TrainingSequence]) -> Rows:
    for row in sequences:
        yield trl_row(row, line["reward"])


def datum_fields(
    row: TrainingSequence, inputs: int, scale: float = 1.0
) -> tuple[list[int], dict[str, dict[str, Any]]]:
    """Returns the fields of Tinker's `Datum` for a row: the target at each input is the next token.

    Args:
        row: The row.
        inputs: Number of its tokens that are inputs.
        scale: Factor of the advantages; tokens that are not trained on have the advantage 0.

    Returns:
        Input ids, and the `TensorData` of each of `loss_fn_inputs`.
    """
    targets = slice(1, inputs + 1)

    def tensor(values: np.ndarray, dtype: str) -> dict[str, Any]:
        return {"data": values[targets].tolist(), "dtype": dtype, "shape": [inputs]}

    return row.ids[:inputs].tolist(), {
        "target_tokens": tensor(row.ids, "int64"),
        "logprobs": tensor(row.logprobs, "float32"),
        "advantages": tensor(np.where(row.mask, row.advantages * scale, 0.0), "float32"),
    }


def _tinker(line: Line, sequences: Sequence[TrainingSequence]) -> Rows:
    for row in sequences:
        ids, inputs = datum_fields(row, len(row.ids) - 1)
        yield {"model_input": {"chunks": [{"type": "encoded_text", "tokens": ids}]}, "loss_fn_inputs": inputs}


def _verl(line: Line, sequences: Sequence[TrainingSequence]) -> Rows:
    for row in sequences:
        start, versions = first_sampled(row), row.versions[row.mask]
        yield {
            "prompt_ids": row.ids[:start].tolist(),
            "response_ids": row.ids[start:].tolist(),
            "response_mask": row.mask[start:].astype(int).tolist(),
            "response_logprobs": row.logprobs[start:].tolist(),
            "reward_score": line["reward"],
            "num_turns": len(line["messages"]),
            "metrics": {},
            "extra_fields": {
                "uid": line["group_id"],  # groups are compared by it
                "min_global_steps": int(versions.min(initial=np.iinfo(np.int64).max))
                if len(versions)
                else -1,
                "max_global_steps": int(versions.max(initial=-1)),
            },
        }


def _prime_rl(line: Line, sequences: Sequence[TrainingSequence]) -> Rows:
    for row in sequences:
        yield {
            "token_ids": row.ids.tolist(),
            "mask": row.mask.tolist(),
            "logprobs": row.logprobs.tolist(),
            "temperatures": row.temperature.tolist(),
            "env_name": line["env"],
            "advantages": row.advantages.tolist(),
        }


def _atif(line: Line, sequences: Sequence[TrainingSequence]) -> Rows:
    trajectory = decode_trajectory(line)
    steps: list[dict[str, Any]] = []
    sampled = _sampled(trajectory)
    for index, message in enumerate(trajectory.messages):
        if message["role"] == "tool" and steps:
            _observe(steps[-1], message)
        else:
            step = _step(message, sampled.get(index), trajectory)
            steps.append({"step_id": len(steps) + 1, **step})
    if steps:
        names = ("task_id", "env", "split", "outcome", "reward", "reward_parts", "group_id", "slot", "error")
        also = {"state": line["state"], "advantage": line.get("turn_advantages", line["advantage"])}
        if trajectory.policy_rewards:
            also["policy_rewards"] = trajectory.policy_rewards
        yield {
            "schema_version": "ATIF-v1.7",
            "session_id": trajectory.session_id,
            "agent": {"name": "tidegate", "version": __version__},
            "steps": steps,
            "extra": {**{name: line[name] for name in names}, **also},
        }


def _sampled(trajectory: Trajectory) -> dict[int, Turn]:
    """Returns the turn of each sampled reply by the index of its message.

    Messages are the newest branch: its turns match the last assistant messages; the agent gave earlier ones.
    """
    delivered = [*trajectory.delivered_turns()]
    branch = ([turn for turn in delivered if turn.trainable] or delivered)[-1:]
    while branch and (parent := branch[-1].parent) is not None:
        branch.append(trajectory.turns[parent])
    replies = [index for index, one in enumerate(trajectory.messages) if one["role"] == "assistant"]
    return dict(zip(reversed(replies), branch, strict=False))


def _step(message: Mapping[str, Any], turn: Turn | None, trajectory: Trajectory) -> dict[str, Any]:
    source = {"assistant": "agent", "user": "user"}.get(message["role"], "system")
    step: dict[str, Any] = {"source": source, "message": _text(message.get("content"))}
    if source != "agent":
        return step
    if message.get("reasoning_content"):
        step["reasoning_content"] = _text(message["reasoning_content"])
    if calls := message.get("tool_calls"):
        step["tool_calls"] = [_call(call, f"call_{place}") for place, call in enumerate(calls)]
    if turn is not None:
        step |= {"llm_call_count": 1, "metrics": _metrics(turn, trajectory)}
        if turn.started:
            step["timestamp"] = datetime.fromtimestamp(turn.started, UTC).isoformat()
    return step


def _metrics(turn: Turn, trajectory: Trajectory) -> dict[str, Any]:
    prompt = trajectory.prompt_ids(turn).tolist()
    extra: dict[str, Any] = {
        "version_spans": [list(span) for span in turn.version_spans],
        "temperature": turn.temperature,
        "finish_reason": turn.finish_reason,
        "trainable": turn.trainable,
    }
    if turn.policy:
        extra["policy"] = turn.policy
    if turn.output_mask is not None:
        extra["output_mask"] = turn.output_mask.tolist()
    if turn.top_ids is not None and turn.top_logprobs is not None:
        shape = (-1, turn.top_k)
        extra |= {
            "top_ids": turn.top_ids.reshape(shape).tolist(),
            "top_logprobs": turn.top_logprobs.reshape(shape).tolist(),
        }
    if turn.kept_ids is not None and turn.kept_counts is not None:
        extra |= {"kept_ids": turn.kept_ids.tolist(), "kept_counts": turn.kept_counts.tolist()}
    return {
        "prompt_tokens": len(prompt),
        "completion_tokens": len(turn.output_ids),
        "cached_tokens": turn.cached_tokens,
        "prompt_token_ids": prompt,
        "completion_token_ids": turn.output_ids.tolist(),
        "logprobs": turn.logprobs.tolist(),
        "extra": extra,
    }


def _call(call: Mapping[str, Any], missing_id: str) -> dict[str, Any]:
    function = call.get("function") or {}
    given = function.get("arguments")
    try:
        arguments = json.loads(given) if isinstance(given, str) else given
    except ValueError:
        arguments = None
    read = isinstance(arguments, dict)
    return {
        "tool_call_id": call.get("id") or missing_id,
        "function_name": function.get("name") or "",
        "arguments": arguments if read else {},
        **({} if read else {"extra": {"arguments": given}}),
    }


def _observe(step: dict[str, Any], message: Mapping[str, Any]) -> None:
    """Adds a tool's result to the step before it."""
    result = {"content": _text(message.get("content"))}
    if message.get("tool_call_id") in {call["tool_call_id"] for call in step.get("tool_calls", ())}:
        result["source_call_id"] = message["tool_call_id"]
    step.setdefault("observation", {"results": []})["results"].append(result)


def _text(content: Any) -> str:
    """Returns the text of a message; parts that are no text as JSON."""
    if isinstance(content, list) and all(isinstance(part, dict) and "text" in part for part in content):
        return "".join(part["text"] for part in content)
    if content is None or isinstance(content, str):
        return content or ""
    return json.dumps(content, ensure_ascii=False)


LIKELIEST = "the engine's likeliest and kept ids (logprobs are those among kept ids, if there are any)"
FORMATS = {
    "tinker": Format(
        _tinker,
        "groups, episodes, rewards, versions, temperatures, the mask (a token that is not trained on has the "
        f"advantage 0), {LIKELIEST}",
    ),
    "trl": Format(
        _trl,
        "advantages (TRL computes them from the rewards), temperatures, "
        f"{LIKELIEST}, the group of an episode with several sequences (each is a row)",
    ),
    "verl": Format(
        _verl,
        "advantages (verl computes them from the rewards), temperatures, versions of single tokens (it has "
        f"the oldest and the newest of a sequence), {LIKELIEST}, episodes with several sequences (each is a "
        "row, which counts in the group)",
    ),
    "prime-rl": Format(_prime_rl, f"groups, episodes, rewards, versions, {LIKELIEST}"),
    "atif": Format(
        _atif,
        "branches other than the newest, undelivered turns, advantages of single tokens",
        batches_only=False,
    ),
}
