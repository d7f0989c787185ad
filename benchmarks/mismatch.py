"""Measures held-out reward where the engine samples from rounded weights, with and without score centering.

The loop of `staleness.py` on the arithmetic demo, at staleness 0: the only difference between the sampling
model and the trainer's is `--quantize` (simulated rounding, tidegate/engine/model/rounding.py). Every setting
takes `--tokens` trained tokens; without and with centering, the learning rate falls to a tenth until then.
Held-out reward is that of the trainer's own weights, which a run publishes; `rounded` is the reward of the
same weights, rounded, as a run's evaluation through its engines finds it. The curve is the mean reward of
each batch, which the rounded weights sample.

A cell already measured with the same settings is not measured again.

    python benchmarks/mismatch.py [--json] [--seeds 0 1 2] [--quantize five_levels] [--tokens 88000]
                                   [--out DIR]
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import Check, parser_of, report
from staleness import DEFAULT, ROOT, Cell, found_or_measured, summary

from tidegate.engine.model.rounding import LARGEST

# At a constant rate a single large gradient, late in training, ended a seed at 0.63 (RESULTS.md).
OPTIMIZER = "beta1=0.9,max_grad_norm=0.5,schedule=linear"
STEP_TOKENS = 1_467
"""Trained tokens of a batch, about."""


def with_mismatch(loss: str, quantize: str) -> str:
    return f"{loss}{',' if ':' in loss else ':'}quantize={quantize}"


def curve(cells: list[dict[str, Any]], width: int = 5) -> list[float]:
    """Mean reward of sampled episodes over all seeds, for each `width` steps that all seeds took."""
    steps = min(len(cell["batch_rewards"]) for cell in cells) // width * width
    batches = np.array([cell["batch_rewards"][:steps] for cell in cells])
    return [round(float(one), 3) for one in batches.reshape(len(cells), -1, width).mean(axis=(0, 2))]


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="default: 0 1 2")
    parser.add_argument("--quantize", choices=LARGEST, default="five_levels", help="default: five_levels")
    parser.add_argument(
        "--tokens", type=int, default=88_000, help="token budget of a cell; the default is about 60 steps"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/mismatch"), help="directory of the results")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    sys.path.append(str(ROOT))  # the package `examples`
    optimizer = f"{OPTIMIZER},steps={round(arguments.tokens / STEP_TOKENS)}"
    losses = {
        "no mismatch": DEFAULT,
        "default": with_mismatch(DEFAULT, arguments.quantize),
        "without centering": with_mismatch(f"truncated_is:{optimizer}", arguments.quantize),
        "with centering": with_mismatch(f"truncated_is:score_centering=32,{optimizer}", arguments.quantize),
    }
    results, rewards, rounded = [], {}, {}
    for name, loss in losses.items():
        cells = [
            found_or_measured(Cell("0", loss, seed), arguments.tokens, arguments.out)
            for seed in arguments.seeds
        ]
        row = summary("0", loss, cells)
        rewards[name] = row["reward"]
        # Without rounding, the model that samples is the trainer's.
        sampled = [cell["reward" if cell["rounded_reward"] is None else "rounded_reward"] for cell in cells]
        rounded[name] = float(np.mean(sampled))
        results.append({"setting": name, **row, "rounded": sampled, "curve": curve(cells)})
    return report(
        results,
        [
            Check("default_loses", rewards["no mismatch"] - rewards["default"], ">=", 0.3),
            Check("default_loses_rounded", rounded["no mismatch"] - rounded["default"], ">=", 0.3),
            Check(
                "with_centering_vs_no_mismatch",
                rewards["with centering"] / rewards["no mismatch"],
                ">=",
                0.95,
            ),
        ],
        as_json=arguments.json,
    )


if __name__ == "__main__":
    sys.exit(main())
