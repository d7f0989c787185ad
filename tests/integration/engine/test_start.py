"""Start and end of the engine: clear errors for models it cannot serve, and no leftover process."""

from __future__ import annotations

import json
import os
import signal
import threading
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import transformers

from tests.tiny import make_tiny_model
from tests.waiting import announced
from tidegate.engine.model.model import Model, load_model
from tidegate.engine.options import EngineOptions
from tidegate.engine.scheduling.slots import Slots
from tidegate.engine.server.server import serve
from tidegate.errors import EngineError, StartError
from tidegate.service.serve import Listen, bind
from tidegate.weights import checksum

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


def test_a_missing_model_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(StartError, match=r"the model directory .*nowhere does not exist"):
        serve(EngineOptions(tmp_path / "nowhere"), Listen())
    with pytest.raises(StartError, match=r"has no config\.json"):
        serve(EngineOptions(tmp_path), Listen())


def test_a_port_in_use_is_said_before_the_model_is_loaded(tmp_path: Path) -> None:
    with bind(Listen()) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(StartError, match=str(port)):
            serve(EngineOptions(tmp_path / "nowhere"), Listen(port=port))


def test_a_number_that_is_no_port_is_said() -> None:
    with pytest.raises(StartError, match=r"cannot listen on .*:99999"):
        bind(Listen(port=99999))


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (
            lambda: transformers.MistralForCausalLM(transformers.MistralConfig(**SMALL, sliding_window=8)),
            "layer 0 has a sliding window of 8 tokens",
        ),
        (
            lambda: transformers.MambaForCausalLM(
                transformers.MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, state_size=4)
            ),
            "not a standard attention cache",
        ),
        (
            lambda: transformers.BloomForCausalLM(
                transformers.BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=4)
            ),
            "does not run over the slot cache",
        ),
    ],
    ids=["sliding window", "state space", "no position ids"],
)
def test_models_that_cannot_be_served_say_why(tmp_path: Path, model: Any, words: str) -> None:
    model().save_pretrained(tmp_path)
    with pytest.raises(StartError, match=words):
        load_model(EngineOptions(tmp_path, max_context=64))


@pytest.mark.parametrize(
    "model",
    [
        lambda: transformers.GPT2LMHeadModel(
            transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64)
        ),
        lambda: transformers.MistralForCausalLM(transformers.MistralConfig(**SMALL, sliding_window=64)),
        lambda: transformers.Qwen3MoeForCausalLM(
            transformers.Qwen3MoeConfig(
                **SMALL, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2
            )
        ),
    ],
    ids=["learned positions", "a window as long as the context", "experts stored one by one"],
)
def test_other_families_are_served_and_take_new_weights(tmp_path: Path, model: Any) -> None:
    model().save_pretrained(tmp_path)
    loaded = load_model(EngineOptions(tmp_path, max_context=64))  # compares itself with the plain model
    loaded.copy_weights(loaded.read_weights(tmp_path))


def test_the_comparison_at_the_start_notices_a_wrong_position(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tiny_model(tmp_path, hidden=32)
    attention = transformers.models.qwen3.modeling_qwen3.Qwen3RotaryEmbedding
    forward = attention.forward
    monkeypatch.setattr(
        attention, "forward", lambda self, x, position_ids: forward(self, x, position_ids * 0)
    )
    load_model(EngineOptions(tmp_path))  # wrong in both, and equal
    monkeypatch.setattr(
        attention, "forward", lambda self, x, ids: forward(self, x, ids + (ids.shape[1] == 1))
    )
    with pytest.raises(StartError, match="the logits over the slot cache differ by"):
        load_model(EngineOptions(tmp_path))


def test_settings_that_do_not_fit_the_model(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, hidden=32)
    with pytest.raises(StartError, match="more than the model's 4096 positions"):
        load_model(EngineOptions(tmp_path, max_context=4097))
    with pytest.raises(StartError, match=r"engine\.device = 'abacus'"):
        load_model(EngineOptions(tmp_path, device="abacus"))
    (tmp_path / "model.safetensors").write_bytes(b"cut short")
    with pytest.raises(StartError, match="cannot be loaded"):
        load_model(EngineOptions(tmp_path))


def test_weights_that_are_not_those_that_were_written_are_refused_at_the_start(tmp_path: Path) -> None:
    """As they are when an engine that runs is to load them."""
    make_tiny_model(tmp_path, hidden=32)
    checksum.write(tmp_path)
    load_model(EngineOptions(tmp_path))
    path = tmp_path / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(StartError, match="are not those that were written"):
        load_model(EngineOptions(tmp_path))


def generate(url: str, tokens: int) -> tuple[int, Any]:
    body = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": tokens}}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/generate", json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as reply:
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_when_the_scheduler_dies_requests_get_errors_and_the_server_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    make_tiny_model(tmp_path / "model", hidden=32)
    announce, decode = tmp_path / "engine.json", Model.decode

    def dying(self: Model, slots: Slots) -> Any:
        if slots.count == 3:
            raise RuntimeError("planted fault")
        return decode(self, slots)

    monkeypatch.setattr(Model, "decode", dying)
    with ThreadPoolExecutor(4) as pool:

        def ask() -> list[tuple[int, Any]]:
            url = announced(announce)
            return [generate(url, 5), *pool.map(lambda _: generate(url, 450), range(3))]

        asking = pool.submit(ask)
        late = threading.Timer(60, os.kill, (os.getpid(), signal.SIGINT))
        late.start()
        with pytest.raises(EngineError, match="planted fault"):
            serve(EngineOptions(tmp_path / "model", max_context=512), Listen(announce=announce))
        late.cancel()
    replies = asking.result()
    assert [status for status, _ in replies] == [200, 500, 500, 500]
    assert all("planted fault" in reply["error"]["message"] for _, reply in replies[1:])
    assert "in dying" in caplog.text, "the traceback"
