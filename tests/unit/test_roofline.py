"""The predictions of `benchmarks/roofline.py` for a tiny model, whose figures are known."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tidegate.plan.shape import PUBLISHED

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
TINY = {
    "model_type": "qwen3", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "head_dim": 16,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False,
}  # fmt: skip
OPERATIONS_OF_A_LAYER = 180
"""Largest number of kernels that the forward and backward pass of a layer launch."""


CODE = f"""if True:
    import dataclasses, json, sys
    sys.path.insert(0, {str(BENCHMARKS)!r})
    import roofline
    tiny = {TINY!r}
    roofline.PUBLISHED = {{"tiny": tiny, "deeper": {{**tiny, "num_hidden_layers": 4}}}}
"""
MEASURE = """
    run, deeper = roofline.recorded("tiny", 1), roofline.recorded("deeper", 1)
    together = roofline.fused(run.passed, run.stepped)
    in_one = [dataclasses.replace(one, part="all") for one in run.passed]
    print(json.dumps({
        "useful": roofline.useful_flops(run.config, run.parameters), "parameters": run.parameters,
        "peak": run.peak, "sent": run.sent, "operations": len(run.passed), "fused": len(together),
        "fused_at_will": len(roofline.fused(in_one, run.stepped)),
        "parts": sorted({one.part or "" for one in run.passed}),
        "work": sum(one.flops for one in run.passed), "fused_work": sum(one.flops for one in together),
        "bytes": sum(one.size for one in run.passed), "fused_bytes": sum(one.size for one in together),
        "of_a_layer": len(deeper.passed) - len(run.passed),
    }))
"""


def executed(code: str) -> str:
    """Runs code in a process of its own: a process that had fake tensors of a GPU sometimes aborts later."""
    command = [sys.executable, "-W", "ignore", "-c", CODE + code]
    return subprocess.run(command, check=True, timeout=300, capture_output=True, text=True).stdout


@pytest.mark.timeout(300)  # it imports torch and transformers
def test_a_step_is_recorded_with_its_work_and_memory() -> None:
    run = json.loads(executed(MEASURE).splitlines()[-1])
    # Logits are computed again, and torch's kernels compute whole squares of scores.
    assert run["useful"] < run["work"] < 1.5 * run["useful"]
    assert run["peak"] > 16 * run["parameters"], "weights, gradients and moments in float32"
    assert run["fused"] < run["operations"] / 2
    assert run["fused"] > run["fused_at_will"], "layers are compiled one by one"
    layers = [f"layer {number}{ending}" for number in range(3) for ending in ("", ", backward")]
    assert run["parts"] == ["", *layers]
    assert run["fused_work"] == run["work"]
    assert run["fused_bytes"] < run["bytes"]
    assert run["sent"] == 0
    assert 0 < run["of_a_layer"] <= OPERATIONS_OF_A_LAYER


CRASHES = """
    from pathlib import Path
    from types import SimpleNamespace
    from subprocess import CalledProcessError, CompletedProcess
    def run(command, **_):
        name, gpus, file = command[-3:]
        if name == "tiny":
            Path(file).write_bytes(roofline.pickle.dumps("recorded"))
        return CompletedProcess(command, -6)
    def predicted(name, gpus, run):
        assert run == "recorded"
        return [{"shape": name, "gpus": gpus, "gpu": "h200", "peak_vs_plan": 0.9}]
    roofline.subprocess = SimpleNamespace(run=run, CalledProcessError=CalledProcessError)
    roofline.predicted, roofline.costs = predicted, lambda *_: {}
    assert roofline.main(["--json", "--shape", "deeper", "tiny", "--gpus", "1"]) == 1
"""


@pytest.mark.timeout(300)
def test_a_shape_whose_process_crashes_fails_alone_and_a_complete_result_counts() -> None:
    report = json.loads(executed(CRASHES).splitlines()[-1])
    assert [row.get("peak_vs_plan") for row in report["results"]] == [None, 0.9]
    assert "-6" in report["results"][0]["failed"] or "SIGABRT" in report["results"][0]["failed"]
    values = {check["name"]: check["value"] for check in report["checks"]}
    assert values["recorded_deeper_on_1"] is None
    assert values["peak_vs_plan_smallest"] == values["peak_vs_plan_largest"] == 0.9


@pytest.mark.slow
def test_ranks_share_the_state_and_send_gradients() -> None:
    executed("""
    alone, shared = roofline.recorded("tiny", 1), roofline.recorded("tiny", 4)
    assert shared.sent > 4 * shared.parameters, "gradients in float32"
    assert shared.peak < alone.peak - 10 * alone.parameters
    assert {one.part for one in shared.passed} == {one.part for one in alone.passed}, "compiled by layers"
""")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_plan_is_near_the_peak_of_every_published_shape() -> None:
    command = [sys.executable, "-W", "ignore", str(BENCHMARKS / "roofline.py"), "--json", "--gpus", "1"]
    run = subprocess.run(
        [*command, "--shape", *PUBLISHED], timeout=600, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
    checked = {check["name"]: check for check in json.loads(run.stdout.splitlines()[-1])["checks"]}
    assert checked["peak_vs_plan_smallest"]["goal"] == 0.85
    assert checked["peak_vs_plan_largest"]["goal"] == 1.1
