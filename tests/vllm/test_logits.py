"""Logits of a model in bfloat16, in a server that `tidegate vllm` starts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.engine_contract import served
from tests.tiny import make_tiny_model
from tests.tiny_tokenizer import make_tokenizer
from tests.vllm.conftest import ARGUMENTS, vllm_server
from tidegate.config import EngineSettings

PROMPT = list(range(1, 200))


@pytest.mark.parametrize(("rounded", "more"), [(False, []), (True, ["--hf-overrides", "{}"])])
async def test_logits_of_a_model_in_bfloat16_are_in_float32(
    python: str, tmp_path: Path, rounded: bool, more: list[str]
) -> None:
    """Two logprobs of one position differ as their logits do; rounded logits have eight digits."""
    model = make_tiny_model(tmp_path / "base", vocab=640, hidden=128, spread=0.05)
    make_tokenizer().save_pretrained(tmp_path / "base")
    with torch.no_grad():
        exact = torch.log_softmax(model(torch.tensor([PROMPT])).logits[0, :-1].float(), -1)
    body = {
        "input_ids": PROMPT, "sampling_params": {"max_new_tokens": 0}, "return_logprob": True,
        "logprob_start_len": 0, "top_logprobs_num": 20,
    }  # fmt: skip
    arguments = ["--dtype", "bfloat16", *ARGUMENTS[2:], *more]
    settings = EngineSettings(kind="vllm", python=Path(python), arguments=arguments)
    async with served(vllm_server(settings, lambda: (tmp_path / "base", 0), tmp_path)) as engine:
        status, reply = await engine.post("/generate", body)
    assert status == 200, reply
    meta = reply["meta_info"]
    said = torch.tensor([one[0] for one in meta["input_token_logprobs"][1:]])
    error = (said - exact[torch.arange(len(said)), PROMPT[1:]]).abs().mean()
    print(f"mean error of a logprob: {float(error):.5f}")
    listed = torch.tensor([[one[0] for one in some] for some in meta["input_top_logprobs"][1:]]).double()
    steps = (listed[:, 1:] - listed[:, :1]) * 2**12
    on_grid = ((steps - steps.round()).abs() < 0.05).double().mean()
    print(f"differences on the grid of bfloat16: {float(on_grid):.3f}")
    assert (on_grid > 0.9) == rounded
