"""The parts of the GPU benchmark, run on the CPU."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import gpu

SCRIPT = Path(gpu.__file__)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_it_says_so_and_claims_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["--json"]) == 0
    sentence, told = capsys.readouterr().out.splitlines()
    assert sentence == "torch finds no CUDA device here: nothing was measured, and nothing is claimed."
    assert (json.loads(told)["results"], json.loads(told)["checks"]) == ([], [])


def test_every_part_measures_something(tmp_path: Path) -> None:
    results, checks = gpu.measure(gpu.SHAPES["tiny"], torch.device("cpu"), tmp_path)
    what = [row.pop("what", "device") for row in results]
    assert what == ["device", "decode, 1", "decode, 4", "step, 4 rows of 64", "publish"]
    figures = [value for row in results for value in row.values() if not isinstance(value, str)]
    assert all(math.isfinite(value) and value > 0 for value in figures)
    assert checks == []


def test_the_bound_of_decode_counts_weights_once_and_keys_of_every_row(tmp_path: Path) -> None:
    shape = gpu.SHAPES["tiny"]
    gpu.make_model(tmp_path, shape)
    model = gpu.load_model(gpu.EngineOptions(tmp_path, dtype="bfloat16", max_slots=4, max_context=64))
    weights = 2 * sum(one.numel() for one in model.hf_model.parameters())
    keys_and_values = 2 * 2 * 2 * 16 * 2  # of a token: both, layers, heads, dimensions, bytes
    bound = gpu.Device(torch.device("cpu"), bytes_s=1e6, flops_s=1.0)
    assert gpu.limit(model, 4, 8, bound) == pytest.approx(4e6 / (weights + 4 * 12 * keys_and_values))


@pytest.mark.slow
def test_the_whole_script_on_a_cpu() -> None:
    done = subprocess.run(
        [sys.executable, SCRIPT, "--shape=tiny", "--device=cpu", "--json"],
        cwd=SCRIPT.parents[1], capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, (done.stdout, done.stderr)
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["results"][-1]["what"] == "demo"
    assert told["results"][-1]["audit"]
    assert told["checks"] == []
