"""Measures held-out reward on a demo's tasks after equal numbers of tokens, by staleness and loss.

Staleness is fixed: each step's batch is sampled from the weights of exactly that many steps earlier (the
first batches from the initial weights), and with `none` all batches from the initial weights. Policy, credit
and losses are those of a run; the agent's loop over plain `generate` replaces agents, gateway and engines
(and the retrieval server of the search demo), so that the result does not depend on the machine's speed. A
cell (one loss, one staleness, one seed) ends once it has trained on `--tokens` tokens.

A cell already measured with the same settings is not measured again, so the table can be filled in pieces,
also by several processes with different seeds.

    python benchmarks/staleness.py [--json] [--demo arithmetic|search] [--losses dapo dppo:divergence=kl]
                                   [--staleness 0 2 8] [--seeds 0 1 2] [--tokens 24000] [--out DIR]

A loss is a name, or NAME:SETTING=VALUE,… with settings of the loss or of `[trainer]`, or of the sampling of
batches: `top_p`, whose kept ids `replay=false` leaves out, and `quantize`.
`--losses` without values lists the default ones.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import Check, parser_of, report
from transformers import AutoModelForCausalLM, AutoTokenizer

from tidegate.agents.search_tools import tool_definitions
from tidegate.agents.solver import TOOLS
from tidegate.config import TrainerSettings
from tidegate.engine.model.rounding import use_rounding
from tidegate.envs.arithmetic import Arithmetic
from tidegate.envs.base import Environment
from tidegate.evaluation.stats import student
from tidegate.settings.losses import BY_NAME, SEVERAL_STEPS
from tidegate.trainer.batch.batcher import rows_to_train
from tidegate.trainer.batch.credit import BaselineCredit
from tidegate.trainer.policy.policy import Policy
from tidegate.turn import Turn, VersionSpan
from tidegate.types import Group, Outcome, Task, Trajectory

ROOT = Path(__file__).parents[1]
LOSSES = (
    *(name for name in BY_NAME if name != "custom"),
    "dppo:divergence=tv", "dapo:dual_clip=3", "dapo:sequence_mask=0.05", "truncated_is:ess_scaling=true",
    "truncated_is:score_centering=32",
)  # fmt: skip
BOUNDS = ("0", "1", "2", "4", "8", "16", "none")
DEFAULT, DEFAULT_BOUND = TrainerSettings().loss.name, str(TrainerSettings().max_staleness)
GROUPS, SIZE, LEARNING_RATE = 8, 8, 3e-4
HELD_OUT = 200
FIGURES = ("ess", "clip_fraction", "lag_kl", "entropy")
SAMPLED = ("top_p", "replay", "quantize")
Weights = dict[str, torch.Tensor]


def settings_of(loss: str) -> TrainerSettings:
    """Returns the settings of a loss given as NAME or NAME:SETTING=VALUE,…; raises ValueError."""
    name, _, options = loss.partition(":")
    settings: dict[str, Any] = {
        "loss": {"name": name},
        "minibatches": 2 if name in SEVERAL_STEPS else 1,
        "learning_rate": LEARNING_RATE,
    }
    for option in options.split(",") if options else ():
        key, _, value = option.partition("=")
        if key in SAMPLED:
            continue
        place = settings if key in TrainerSettings.model_fields else settings["loss"]
        place[key] = json.loads(value) if value[:1].isdigit() or value in ("true", "false") else value
    return TrainerSettings(**settings)


def sampling_of(loss: str) -> tuple[float, bool, str | None]:
    """Returns top-p, whether its kept ids are recorded, and the type to which sampling rounds weights."""
    options = dict(option.split("=") for option in loss.partition(":")[2].split(",") if option)
    return float(options.get("top_p", 1.0)), options.get("replay") != "false", options.get("quantize")


def loss_name(text: str) -> str:
    """Returns the text if it names a loss with its settings; raises ArgumentTypeError."""
    try:
        settings_of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


@dataclass(frozen=True)
class Demo:
    """Model, tasks and tool of one demo.

    Args:
        base: Directory of the base model.
        result_of: Tool result for a reply, or None if the reply calls no tool.
    """

    base: Path
    environment: Environment
    tools: Sequence[Any]
    result_of: Callable[[str], str | None]
    max_turns: int
    max_tokens: int


def arithmetic_demo() -> Demo:
    from examples.tiny_base import evaluate

    base = ROOT / "examples" / "tiny_base" / "model"
    return Demo(base, Arithmetic(), TOOLS, evaluate.answer_to_call, max_turns=4, max_tokens=48)


def search_demo() -> Demo:
    """The search demo; its corpus has the passages of both worlds, as in a run."""
    from examples.demo_search.env import WorldQuestions
    from examples.demo_search.synthetic_world import SyntheticWorld, make_world
    from examples.search_base import evaluate

    world = SyntheticWorld(make_world(0, "train").facts + make_world(0, "held_out").facts)
    base = ROOT / "examples" / "search_base" / "model"
    find = partial(evaluate.search_result, world)
    return Demo(base, WorldQuestions(), tool_definitions(open=False), find, max_turns=5, max_tokens=40)


DEMOS = {"arithmetic": arithmetic_demo, "search": search_demo}


@dataclass(frozen=True)
class Cell:
    bound: str
    loss: str
    seed: int
    demo: str = "arithmetic"

    def path(self, directory: Path, tokens: int) -> Path:
        """File of its result."""
        loss = self.loss.replace(":", "-").replace(",", "-")
        demo = "" if self.demo == "arithmetic" else f"{self.demo}-"
        return directory / f"{demo}{self.bound}-{loss}-{tokens}-{self.seed}.json"

    def sampled_at(self, step: int) -> int:
        """The version from which the batch of the 0-based `step` is sampled."""
        return 0 if self.bound == "none" else max(0, step - int(self.bound))


class Sampler:
    """Runs the agent's loop over batches, without a gateway."""

    def __init__(
        self, demo: str, top_p: float = 1.0, replay: bool = True, quantize: str | None = None, listed: int = 0
    ) -> None:
        self.demo = DEMOS[demo]()
        self.top_p, self.replay, self.quantize, self.listed = top_p, replay, quantize, listed
        self.environment = self.demo.environment
        self.tokenizer = AutoTokenizer.from_pretrained(self.demo.base)
        self.model = AutoModelForCausalLM.from_pretrained(self.demo.base, dtype=torch.float32)
        if quantize is not None:
            use_rounding(self.model, quantize)

    def groups(self, step: int, weights: Weights, version: int) -> list[Group]:
        """A batch of groups on the training tasks of this step."""
        self.model.load_state_dict(weights)
        tasks = [self.environment.train_task(step * GROUPS + number) for number in range(GROUPS)]
        found = self.episodes([task for task in tasks for _ in range(SIZE)], version, self.top_p)
        groups = []
        for number, task in enumerate(tasks):
            members = found[number * SIZE : (number + 1) * SIZE]
            for slot, one in enumerate(members):
                one.group_id, one.slot, one.session_id = f"g{number}", slot, f"g{number}.{slot}"
            groups.append(Group(f"g{number}", task.id, members))
        return groups

    def reward(self, weights: Weights) -> float:
        """Mean sampled reward over the held-out tasks."""
        self.model.load_state_dict(weights)
        found = self.episodes(self.environment.eval_sets()[""][:HELD_OUT], 0)
        return float(np.mean([one.reward for one in found]))

    def episodes(self, tasks: Sequence[Task], version: int, top_p: float = 1.0) -> list[Trajectory]:
        """One episode per task, with the logprobs of the sampled tokens."""
        how = {"tools": list(self.demo.tools), "add_generation_prompt": True, "return_dict": False}
        prompts = [self.tokenizer.apply_chat_template(list(task.messages), **how) for task in tasks]
        asked, texts = list(prompts), [""] * len(tasks)
        turns: list[list[Turn]] = [[] for _ in tasks]
        live = list(range(len(tasks)))
        for _ in range(self.demo.max_turns):
            still = []
            replies = self._replies([prompts[n] for n in live], top_p)
            for one, (ids, logprobs, scores_tv) in zip(live, replies, strict=True):
                turns[one].append(_turn(len(turns[one]), asked[one], ids, logprobs, version))
                if self.listed:
                    top = scores_tv.topk(min(self.listed, scores_tv.shape[1]))
                    turns[one][-1].top_ids = top.indices.flatten().numpy().astype(np.int32)
                    turns[one][-1].top_logprobs = top.values.flatten().numpy().astype(np.float16)
                if top_p < 1 and self.replay:
                    kept = scores_tv.isfinite().numpy()
                    turns[one][-1].kept_counts = kept.sum(1).astype(np.int32)
                    turns[one][-1].kept_ids = kept.nonzero()[1].astype(np.int32)
                texts[one] = self.tokenizer.decode([token for token in ids if token != self._end])
                result = self.demo.result_of(texts[one]) if ids[-1] == self._end else None
                if result is not None:
                    asked[one] = self.tokenizer.encode(
                        f"\n<|im_start|>user\n<tool_response>\n{result}\n</tool_response><|im_end|>\n"
                        "<|im_start|>assistant\n"
                    )
                    prompts[one] = prompts[one] + ids + asked[one]
                    still.append(one)
            live = still
            if not live:
                break
        return [self._rewarded(*each) for each in zip(tasks, turns, texts, strict=True)]

    @property
    def _end(self) -> int:
        return int(self.tokenizer.eos_token_id)

    def _rewarded(self, task: Task, turns: list[Turn], text: str) -> Trajectory:
        found = Trajectory("", task.id, task.env, "train", Outcome.COMPLETED, turns)
        found.reward = float(self.environment.score(task, None, text, []).reward)
        return found

    def _replies(
        self, prompts: Sequence[list[int]], top_p: float
    ) -> list[tuple[list[int], list[float], torch.Tensor]]:
        """A sampled reply to each prompt, with the end token, its logprobs and those of all ids."""
        longest, pad = max(map(len, prompts)), self.tokenizer.pad_token_id
        ids_bt = torch.tensor([[pad] * (longest - len(one)) + one for one in prompts])
        mask_bt = torch.tensor([[0] * (longest - len(one)) + [1] * len(one) for one in prompts])
        with torch.inference_mode():
            out = self.model.generate(
                ids_bt, attention_mask=mask_bt, max_new_tokens=self.demo.max_tokens, do_sample=True,
                temperature=1.0, top_k=0, top_p=top_p, return_dict_in_generate=True, output_scores=True,
            )  # fmt: skip
        sampled_bt = out.sequences[:, longest:]
        scores_btv = torch.log_softmax(torch.stack(out.scores, dim=1).float(), dim=-1)
        logprobs_bt = scores_btv.gather(-1, sampled_bt[..., None])[..., 0]
        found = []
        for ids, logprobs, scores_tv in zip(
            sampled_bt.tolist(), logprobs_bt.tolist(), scores_btv, strict=True
        ):
            length = ids.index(self._end) + 1 if self._end in ids else len(ids)
            found.append((ids[:length], logprobs[:length], scores_tv[:length]))
        return found


def _turn(index: int, asked: list[int], ids: list[int], logprobs: list[float], version: int) -> Turn:
    return Turn(
        index=index, parent=index - 1 if index else None, delta_ids=np.array(asked, np.int32),
        output_ids=np.array(ids, np.int32), logprobs=np.array(logprobs, np.float32),
        version_spans=(VersionSpan(version, 0, len(ids)),), finish_reason="stop", temperature=1.0,
    )  # fmt: skip


def measure(cell: Cell, tokens: int) -> dict[str, Any]:
    """Trains a cell to its token budget, then evaluates it."""
    began = time.monotonic()
    torch.manual_seed(cell.seed)
    settings = settings_of(cell.loss)
    sampler = Sampler(cell.demo, *sampling_of(cell.loss), settings.loss.listed_ids)
    credit = BaselineCredit(settings)
    policy = Policy.load(sampler.demo.base, settings, cell.seed)
    published, ages, lines, trained = [_copy(policy)], list[int](), list[dict[str, float]](), 0
    rewards = list[float]()
    while trained < tokens:
        step = len(lines)
        version = cell.sampled_at(step)
        groups = sampler.groups(step, published[version], version)
        lines.append(policy.update(rows_to_train(groups, credit(groups)), step))
        ages.append(step - version)
        rewards.append(float(np.mean([one.reward for group in groups for one in group.trajectories])))
        trained += sum(one.sampled_tokens() for group in groups for one in group.trajectories)
        published.append(_copy(policy))
    held_out = sampler.reward(published[-1])
    if sampler.quantize is not None:
        rounded, held_out = held_out, Sampler(cell.demo).reward(published[-1])
    else:
        rounded = None
    return {
        "settings": settings.model_dump(mode="json"), "reward": held_out, "rounded_reward": rounded,
        "batch_rewards": rewards,
        "tokens": trained, "steps": len(lines), "staleness_mean": float(np.mean(ages)),
        "staleness_max": max(ages), "skipped": sum(line["skipped"] for line in lines),
        "logprob_max_error": lines[0]["logprob_max_error"],
        **{name: _mean(lines, name) for name in FIGURES},
        "seconds": round(time.monotonic() - began, 1),
    }  # fmt: skip


def _copy(policy: Policy) -> Weights:
    return {name: value.detach().clone() for name, value in policy.model.state_dict().items()}


def _mean(lines: Sequence[Mapping[str, Any]], name: str) -> float | None:
    known = [float(line[name]) for line in lines if line.get(name) is not None]
    known = [one for one in known if math.isfinite(one)]
    return sum(known) / len(known) if known else None


def untrained(seed: int, demo: str) -> float:
    """Mean sampled reward of the base model over the held-out tasks."""
    torch.manual_seed(seed)
    sampler = Sampler(demo)
    return sampler.reward({name: value.clone() for name, value in sampler.model.state_dict().items()})


def found_or_measured(cell: Cell, tokens: int, directory: Path) -> dict[str, Any]:
    """The stored result of a cell with the same settings, or a new one, which is stored."""
    path = cell.path(directory, tokens)
    if path.exists():
        found: dict[str, Any] = json.loads(path.read_text())
        if found.get("settings") == settings_of(cell.loss).model_dump(mode="json"):
            return found
    result = measure(cell, tokens)
    keep(path, result)
    return result


def keep(path: Path, result: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(result))
    partial.replace(path)


def summary(bound: str, loss: str, cells: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Mean held-out reward of a loss at a staleness over seeds, with its 95% interval by Student's t."""
    rewards = [float(cell["reward"]) for cell in cells]
    mean = float(np.mean(rewards))
    low, high = (
        student(mean, float(np.var(rewards, ddof=1)), len(rewards)) if len(rewards) > 1 else (None, None)
    )
    return {
        "loss": loss, "staleness": bound, "reward": mean, "low": low, "high": high, "rewards": rewards,
        **{name: _mean(cells, name) for name in ("staleness_mean", "steps", "skipped", *FIGURES)},
    }  # fmt: skip


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Markdown table of held-out reward with its interval, one row per loss."""
    bounds = [bound for bound in BOUNDS if any(row["staleness"] == bound for row in rows)]
    lines = ["| loss | " + " | ".join(bounds) + " |", "|---" * (1 + len(bounds)) + "|"]
    for loss in dict.fromkeys(row["loss"] for row in rows):
        by_bound = {row["staleness"]: row for row in rows if row["loss"] == loss}
        shown = [_shown(by_bound[bound]) if bound in by_bound else "" for bound in bounds]
        lines.append(f"| `{loss}` | " + " | ".join(shown) + " |")
    return "\n".join(lines)


def _shown(row: Mapping[str, Any]) -> str:
    half = "" if row["high"] is None else f" ± {row['high'] - row['reward']:.3f}"
    return f"{row['reward']:.3f}{half}"


def default_vs_best(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """Held-out reward of the default loss at the default bound, divided by that of the best loss there.

    None if the default loss was not measured there.
    """
    rewards = {row["loss"]: row["reward"] for row in rows if row["staleness"] == DEFAULT_BOUND}
    return rewards[DEFAULT] / max(rewards.values()) if DEFAULT in rewards else None


def gains_kept(rows: Sequence[Mapping[str, Any]], before: float, bound: str) -> dict[str, float]:
    """Gain in held-out reward of each loss at a staleness, divided by the largest on-policy gain of any loss.

    `before` is the reward without training. Empty without a cell at staleness 0.
    """
    on_policy = max((row["reward"] for row in rows if row["staleness"] == "0"), default=before)
    if on_policy <= before:
        return {}
    return {
        row["loss"]: (row["reward"] - before) / (on_policy - before)
        for row in rows
        if row["staleness"] == bound
    }


def checks_of(
    rows: Sequence[Mapping[str, Any]], before: float, cells: Mapping[Cell, Mapping[str, Any]]
) -> list[Check]:
    """The checks that the measured cells allow."""
    reached = [
        found["staleness_max"] - min(float(cell.bound), found["steps"] - 1)
        for cell, found in cells.items()
        if cell.bound != "none"
    ]
    errors: dict[bool, list[float]] = {}
    for cell, found in cells.items():
        _, replay, quantize = sampling_of(cell.loss)
        if quantize is None:
            errors.setdefault(replay, []).append(found["logprob_max_error"])
    checks = [
        Check("staleness_is_the_bound", max(map(abs, reached), default=0.0), "==", 0.0),
        Check("logprob_max_error", max(errors.get(True, [0.0])), "<=", 1e-3),
    ]
    if False in errors:
        checks.append(Check("logprob_error_without_replay", min(errors[False]), ">=", 0.02))
    rewards = {(row["loss"], row["staleness"]): row["reward"] for row in rows}
    checks += [
        Check(f"{loss}_vs_{DEFAULT}_at_{bound}", reward / rewards[DEFAULT, bound], ">=", 0.93)
        for (loss, bound), reward in rewards.items()
        if sampling_of(loss)[0] < 1 and sampling_of(loss)[1] and (DEFAULT, bound) in rewards
    ]
    if (ratio := default_vs_best(rows)) is not None:
        checks.append(Check("default_vs_best_at_default_bound", ratio, ">=", 0.98))
    if kept := gains_kept(rows, before, "8"):
        checks.append(Check("gain_kept_at_staleness_8", max(kept.values()), ">=", 0.95))
    return checks


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--demo", choices=DEMOS, default="arithmetic", help="default: arithmetic")
    parser.add_argument("--losses", nargs="*", type=loss_name, default=LOSSES, help="default: all")
    parser.add_argument("--staleness", nargs="+", choices=BOUNDS, default=BOUNDS, help="default: all")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="default: 0 1 2")
    parser.add_argument(
        "--tokens", type=int, default=24_000, help="token budget of a cell; the default is about 16 steps"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/staleness"), help="directory of the results")
    arguments = parser.parse_args()
    if not arguments.losses:
        print("\n".join(LOSSES))
        return 0
    torch.set_num_threads(1)
    sys.path.append(str(ROOT))  # the package `examples`
    product = itertools.product(arguments.seeds, arguments.staleness, arguments.losses)
    cells = {
        cell: found_or_measured(cell, arguments.tokens, arguments.out)
        for cell in (Cell(bound, loss, seed, arguments.demo) for seed, bound, loss in product)
    }
    before = float(np.mean([untrained(seed, arguments.demo) for seed in arguments.seeds]))
    rows = [
        summary(bound, loss, [cells[Cell(bound, loss, seed, arguments.demo)] for seed in arguments.seeds])
        for bound, loss in itertools.product(arguments.staleness, arguments.losses)
    ]
    print(table(rows))
    print(f"\nheld-out reward before training: {before:.3f}; seeds: {', '.join(map(str, arguments.seeds))}")
    kept = gains_kept(rows, before, "8")
    for loss, share in sorted(kept.items(), key=lambda item: -item[1]):
        print(f"share of the on-policy gain kept at staleness 8: {share:6.3f}  {loss}")
    results = [
        {**row, "gain_kept": kept.get(row["loss"]) if row["staleness"] == "8" else None} for row in rows
    ]
    return report([{"before": before}, *results], checks_of(rows, before, cells), as_json=arguments.json)


if __name__ == "__main__":
    sys.exit(main())
