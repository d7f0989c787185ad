"""An unmodified Hugging Face causal language model over the slot cache.

The newest token of a request is never prefilled: it is the input of the next decode step. Therefore every
token is sampled in one place, and a retracted request is prefilled like a new one.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.utils import logging as hf_logging

from tidegate.devices import find_device, free_memory
from tidegate.engine.model.adapters import Adapters
from tidegate.engine.model.kv_cache import VIEW_STEP, SlotCache, round_up
from tidegate.engine.model.rounding import use_rounding
from tidegate.engine.model.sampling import sample, upload
from tidegate.engine.options import EngineOptions
from tidegate.engine.requests.params import SamplingParams
from tidegate.engine.requests.request import Generation, PromptScores, TokenLogprob
from tidegate.engine.scheduling.slots import Slots
from tidegate.engine.weights import loading
from tidegate.errors import StartError
from tidegate.weights import adapter_files, checksum
from tidegate.weights.files import WeightsError, is_adapter, stored_parameters
from tidegate.weights.float_logits import use_float_logits
from tidegate.weights.internals import cache_argument, routers
from tidegate.weights.onednn import use_onednn

PROBE_LENGTHS = (7, 3, 5)
SCORED_LOGITS = 2**26
"""Largest number of logits of a pass that computes logprobs of prompts; bounds its memory."""
PROBE_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.25, torch.float16: 0.05}


class Model:
    """Weights, cache and sampling; used by one thread at a time."""

    def __init__(self, hf_model: Any, max_slots: int, max_context: int) -> None:
        self.hf_model = hf_model
        self.max_slots = max_slots
        self.max_context = max_context
        self.device: torch.device = hf_model.device
        self.dtype: torch.dtype = hf_model.dtype
        self.vocab_size: int = hf_model.get_input_embeddings().num_embeddings
        self.max_scored_tokens = max(1, SCORED_LOGITS // self.vocab_size)
        self.eos_ids = _eos_ids(hf_model)
        if self.device.type == "cuda":
            use_float_logits(hf_model)
        use_onednn(hf_model)
        self.adapters = Adapters()
        self.base: Path | None = None
        """Directory of the live weights, without adapters; None if they are of no directory."""
        self._base_files: list[tuple[int, int, int]] = []
        self._base_checksum: int | None = None
        self.converts_weights = loading.converts_weights(hf_model)
        layers = len(_attention_layers(hf_model.config, max_context))
        self.cache = SlotCache(layers, max_slots, self.device)
        self.routers: dict[int, Any] = {}
        """Those whose choice of experts is cached."""
        self._cache_arguments: dict[str, Any] = {cache_argument(hf_model): self.cache, "use_cache": True}
        # Models with this parameter can skip the logits of other positions.
        self._skips_logits = "logits_to_keep" in inspect.signature(hf_model.forward).parameters
        self._key_numbers = torch.arange(round_up(max_context, VIEW_STEP), device=self.device)
        self._zero = torch.zeros((), dtype=self.dtype, device=self.device)
        self._masked = torch.full((), torch.finfo(self.dtype).min, dtype=self.dtype, device=self.device)

    def prefill(
        self,
        first: int,
        sequences: Sequence[Sequence[int]],
        held: Sequence[int],
        adapters: Sequence[str] = (),
    ) -> None:
        """Caches the keys and values of sequences in rows first..; each has at least one token.

        `held` are the numbers of tokens that the rows already hold, `adapters` the names of the rows' LoRA
        adapters; by default they have none.
        """
        self._prefill(first, sequences, held, 1, adapters)

    @torch.inference_mode()
    def score(
        self,
        first: int,
        sequences: Sequence[Sequence[int]],
        held: Sequence[int],
        targets: Sequence[Sequence[int]],
        top: int = 0,
        adapters: Sequence[str] = (),
    ) -> list[PromptScores]:
        """Does what `prefill` does, and returns the logprobs of each row's targets, at temperature 1.

        A row's targets follow the last tokens of its sequence, one target for each. `top` is the number of
        likeliest ids at each target whose logprobs are returned, too.
        """
        length = max(map(len, sequences))
        begins = [len(ids) - len(wanted) for ids, wanted in zip(sequences, targets, strict=True)]
        logits = self._prefill(first, sequences, held, length - min(begins), adapters)
        dropped = length - logits.shape[1]
        scores = []
        for row, (begin, wanted) in enumerate(zip(begins, targets, strict=True)):
            own = logits[row, begin - dropped : begin - dropped + len(wanted)].float()
            ids = upload(np.array(wanted, np.int64), self.device)
            logprobs = own - own.logsumexp(-1, keepdim=True)
            chosen = logprobs.gather(-1, ids[:, None])[:, 0]
            scores.append(PromptScores(chosen.tolist(), _likeliest(logprobs, top) if top else []))
        return scores

    @torch.inference_mode()
    def _prefill(
        self,
        first: int,
        sequences: Sequence[Sequence[int]],
        held: Sequence[int],
        keep: int,
        adapters: Sequence[str],
    ) -> Tensor:
        """Returns the logits of at least the last `keep` columns, [rows, columns, vocab].

        Sequences are padded on the right: the earlier positions of a causal model never attend to padding,
        and later steps overwrite it.
        """
        self.adapters.select(adapters or [""] * len(sequences), self.device)
        length = max(map(len, sequences))
        ids = np.zeros((len(sequences), length), np.int64)
        for row, sequence in enumerate(sequences):
            ids[row, : len(sequence)] = sequence
        if any(held):
            starts = torch.tensor(held, device=self.device)
            # Padding beyond the context goes to its last position, which is overwritten before it is read.
            positions = (starts[:, None] + self._key_numbers[:length]).clamp_(max=self.max_context - 1)
            seen = round_up(min(max(held) + length, self.max_context), VIEW_STEP)
            self.cache.extend(first, positions, seen)
            return self._forward(upload(ids, self.device), positions, seen, keep)
        self.cache.begin(first, len(sequences), length)
        logits: Tensor = self.hf_model(
            input_ids=upload(ids, self.device),
            position_ids=self._key_numbers[None, :length].expand(len(sequences), length),
            **self._arguments(keep),
        ).logits
        return logits

    def cache_experts(self) -> None:
        """Caches the experts of each token from now on, when the model is run over the cache alone."""
        self.routers = routers(self.hf_model)
        for layer, router in self.routers.items():
            router.register_forward_hook(partial(self._write_experts, layer))

    def _write_experts(self, layer: int, _: Any, __: Any, routed: tuple[Tensor, ...]) -> None:
        self.cache.write_experts(layer, routed[2])

    @torch.inference_mode()
    def decode(self, slots: Slots) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        return sample(self.logits(slots), slots)

    @torch.inference_mode()
    def logits(self, slots: Slots) -> Tensor:
        """Caches the rows' input tokens; returns the logits of the next tokens, [rows, vocab]."""
        n = slots.count
        self.adapters.select([owner.adapter for owner in slots.owners], self.device)
        positions = upload(slots.lengths[:n, None], self.device)
        length = round_up(int(slots.lengths[:n].max()) + 1, VIEW_STEP)
        self.cache.extend(0, positions, length)
        return self._forward(upload(slots.tokens[:n, None], self.device), positions, length, 1)[:, -1]

    def _arguments(self, keep: int) -> dict[str, Any]:
        """Returns the model's arguments for the cache and for the logits of the last `keep` columns."""
        return (
            {**self._cache_arguments, "logits_to_keep": keep} if self._skips_logits else self._cache_arguments
        )

    def _forward(self, ids: Tensor, positions: Tensor, length: int, keep: int) -> Tensor:
        """Runs tokens [rows, tokens] at `positions` of the rows set in the cache; each token attends to the
        earlier positions of its row among the first `length` keys.

        Returns the logits of at least the last `keep` columns, [rows, columns, vocab].
        """
        seen = self._key_numbers[:length] <= positions[:, :, None]
        output = self.hf_model(
            input_ids=ids,
            position_ids=positions,
            attention_mask=torch.where(seen, self._zero, self._masked)[:, None],
            **self._arguments(keep),
        )
        logits: Tensor = output.logits
        return logits

    def read_weights(self, directory: Path) -> loading.CheckedWeights:
        """Reads a version. Of adapters, the base model is read, too, unless it is live.

        Raises WeightsError.
        """
        if not is_adapter(directory):
            return loading.read_weights(self.hf_model, directory)
        headers = adapter_files.read_headers(directory)
        adapters = {name: loading.read_adapter(self.hf_model, header) for name, header in headers.items()}
        header = next(iter(headers.values()))
        if self._has_base(header):
            return loading.CheckedWeights([], adapters)
        header.check_base()
        return replace(loading.read_weights(self.hf_model, header.base), adapters=adapters)

    def set_base(self, directory: Path | None) -> None:
        """Sets the directory that the live weights were read from."""
        self.base, self._base_checksum = directory, None
        self._base_files = [] if directory is None else _file_states(directory)

    def _has_base(self, header: adapter_files.AdapterHeader) -> bool:
        if self.base is None or header.base_checksum is None:
            return self.base == header.base
        if self._base_checksum is None:
            try:
                found = checksum.of_files(self.base)
            except (OSError, ValueError):  # the trainer removed the files
                return False
            if _file_states(self.base) != self._base_files:  # others than those that are live
                return False
            self._base_checksum = found
        return self._base_checksum == header.base_checksum

    def check_weights(self, tensors: Mapping[str, Tensor]) -> loading.CheckedWeights:
        return loading.check_weights(self.hf_model, ((loading.RECEIVED, *item) for item in tensors.items()))

    def serves(self, adapter: str) -> bool:
        """Whether requests may name this LoRA adapter; without a name they get the only one, if any."""
        return not adapter or adapter in self.adapters

    def copy_weights(self, weights: loading.CheckedWeights) -> None:
        loading.copy_weights(weights)
        self.adapters.replace(weights.adapters)
        if weights.pairs:
            self.set_base(weights.directory)


def _file_states(directory: Path) -> list[tuple[int, int, int]]:
    """Returns inode, size and time of change of each file of weights: a replaced file differs in one."""
    try:
        stats = [path.stat() for path in sorted(directory.glob("*.safetensors"))]
    except OSError:  # the trainer removes them
        return []
    return [(stat.st_ino, stat.st_size, stat.st_mtime_ns) for stat in stats]


def load_model(options: EngineOptions) -> Model:
    """Loads a model directory and verifies its weights against their checksum file, if there is one.

    Raises StartError with one sentence.
    """
    if not options.model.is_dir():
        raise StartError(f"the model directory {options.model} does not exist")
    if is_adapter(options.model):
        try:
            model = load_model(replace(options, model=adapter_files.base_directory(options.model)))
            model.copy_weights(model.read_weights(options.model))
            return model
        except WeightsError as error:
            raise StartError(str(error)) from error
    if not (options.model / "config.json").is_file():
        raise StartError(f"{options.model} has no config.json: it is not a Hugging Face model directory")
    torch.set_num_threads(options.threads)
    hf_logging.disable_progress_bar()
    device = find_device("engine.device", options.device)
    hf_model = _pretrained(options)
    damage = checksum.find_damage(options.model)
    if damage is not None:
        raise StartError(damage)
    hf_model.requires_grad_(False).eval().to(device)
    model = Model(hf_model, options.max_slots, options.max_context)
    model.set_base(options.model)
    if options.quantize is not None:
        use_rounding(hf_model, options.quantize)
    check_cached_logits(model, options.model)
    model.cache_experts()
    return model


def _likeliest(logprobs_nv: Tensor, number: int) -> list[list[TokenLogprob]]:
    """Returns the likeliest ids of each row with their logprobs."""
    best = torch.topk(logprobs_nv, number)
    pairs = zip(best.values.tolist(), best.indices.tolist(), strict=True)
    return [list(zip(values, ids, strict=True)) for values, ids in pairs]


def _pretrained(options: EngineOptions) -> Any:
    try:
        config = AutoConfig.from_pretrained(options.model, local_files_only=True)
        _attention_layers(config, options.max_context)
        _check_positions(config, options.max_context)
        _check_memory(options)
        hf_model, loading_info = AutoModelForCausalLM.from_pretrained(
            options.model,
            config=config,
            dtype=getattr(torch, options.dtype),
            local_files_only=True,
            output_loading_info=True,
        )
    except StartError as error:
        raise StartError(f"{options.model}: {error}") from None
    except Exception as error:  # transformers raises many types
        raise StartError(f"{options.model}: the model cannot be loaded: {error}") from error
    for fault in ("missing_keys", "mismatched_keys"):
        if loading_info.get(fault):
            names = sorted(str(name) for name in loading_info[fault])
            raise StartError(f"{options.model}: {fault.replace('_', ' ')} in its weights: {names[:5]}")
    return hf_model


def _eos_ids(hf_model: Any) -> frozenset[int]:
    ids: set[int] = set()
    for config in (hf_model.config, getattr(hf_model, "generation_config", None)):
        eos = getattr(config, "eos_token_id", None)
        ids.update([eos] if isinstance(eos, int) else eos or [])
    return frozenset(ids)


def _attention_layers(config: Any, max_context: int) -> list[Any]:
    """Returns the layers of the standard attention cache. Raises StartError if the model has other layers."""
    layers: list[Any] = DynamicCache(config=config).layers
    for index, layer in enumerate(layers):
        if type(layer) is DynamicLayer:
            continue
        if type(layer) is DynamicSlidingWindowLayer:
            if layer.sliding_window >= max_context:
                continue  # no request outgrows the window, so it is full attention
            raise StartError(
                f"layer {index} has a sliding window of {layer.sliding_window} tokens, engine.max_context is "
                f"{max_context}; set engine.max_context to at most {layer.sliding_window}, or use SGLang"
            )
        raise StartError(
            f"layer {index} has a {type(layer).__name__}, not a standard attention cache; "
            "the embedded engine cannot serve this model, use SGLang"
        )
    if not layers:
        raise StartError("the config has no attention layers; the embedded engine cannot serve this model")
    return layers


def _check_positions(config: Any, max_context: int) -> None:
    positions = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    if isinstance(positions, int) and positions < max_context:
        raise StartError(
            f"engine.max_context = {max_context} is more than the model's {positions} positions "
            "(max_position_embeddings); lower it"
        )


def _check_memory(options: EngineOptions) -> None:
    number, free = stored_parameters(options.model), free_memory(options.device)
    needed = (number or 0) * getattr(torch, options.dtype).itemsize
    if free is not None and needed > free:
        raise StartError(
            f"{number:,} parameters in {options.dtype} need {needed / 1e9:.1f} GB of memory on "
            f"{options.device}, and {free / 1e9:.1f} GB are free: set engine.dtype = bfloat16, or take a "
            "smaller model"
        )


def check_cached_logits(model: Model, path: Path) -> None:
    """Compares logits over the slot cache with the plain model's, on short sequences of different lengths.

    Detects at start a model that ignores `position_ids` or a prepared mask and would sample from wrong
    distributions. Raises StartError.
    """
    tolerance = PROBE_TOLERANCE[model.dtype]
    try:
        difference = _max_logit_difference(model)
    except (TypeError, ValueError, RuntimeError, AttributeError, IndexError) as error:
        raise StartError(f"{path}: the model does not run over the slot cache: {error}") from error
    finally:
        model.cache.drop()
    if not difference <= tolerance:  # also true for NaN
        raise StartError(
            f"{path}: the logits over the slot cache differ by {difference:.3g} from the plain model's; "
            "the embedded engine cannot serve this model, use SGLang"
        )


@torch.inference_mode()
def _max_logit_difference(model: Model) -> float:
    slots = Slots(model.max_slots)
    for length in PROBE_LENGTHS[: model.max_slots]:
        ids = [(length + 7919 * i) % model.vocab_size for i in range(length)]
        generation = Generation(rid="", prompt_ids=ids, params=SamplingParams(), limit=2)
        slots.add(generation)
    for row, generation in enumerate(slots.owners[1:], 1):  # prefill all but the first in two passes
        model.prefill(row, [generation.past[:row]], [0])
    held = range(slots.count)
    model.prefill(0, [generation.past[n:] for n, generation in zip(held, slots.owners, strict=True)], held)
    differences = []
    for _ in range(2):
        over_cache = model.logits(slots)
        for row, generation in enumerate(slots.owners):
            ids = generation.prompt_ids + generation.output_ids
            plain = model.hf_model(input_ids=torch.tensor([ids], device=model.device)).logits[0, -1]
            differences.append((plain.float() - over_cache[row].float()).abs().max())
        following = over_cache.argmax(-1).cpu().numpy()
        slots.advance(following)
        for generation, token in zip(slots.owners, following.tolist(), strict=True):
            generation.output_ids.append(token)
    return float(torch.stack(differences).max())  # NaN if any is NaN
