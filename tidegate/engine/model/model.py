"""A Hugging Face causal language model, unmodified, over the slot cache.

A request's last known token is never prefilled: it is the input of its next decode step. So every
token is sampled in one place, and a retracted request comes back the way a new one comes in.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.utils import logging as hf_logging

from tidegate.devices import find_device
from tidegate.engine.model.device import upload
from tidegate.engine.model.kv_cache import VIEW_STEP, RowSnapshot, SlotCache, rounded
from tidegate.engine.model.sampling import sample
from tidegate.engine.options import EngineOptions
from tidegate.engine.requests.params import SamplingParams
from tidegate.engine.requests.request import Generation
from tidegate.engine.scheduling.slots import Slots
from tidegate.engine.weights.loading import (
    CheckedWeights,
    check_weights,
    converts_weights,
    copy_weights,
    read_weights,
)
from tidegate.errors import StartError
from tidegate.weights import checksum

PROBE_LENGTHS = (7, 3, 5)
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
        self.eos_ids = _eos_ids(hf_model)
        self.converts_weights = converts_weights(hf_model)
        layers = len(_attention_layers(hf_model.config, max_context))
        self.cache = SlotCache(layers, max_slots, self.device)
        # Where a model can do without the logits of other positions.
        takes = inspect.signature(hf_model.forward).parameters
        self._keep_last = {"logits_to_keep": 1} if "logits_to_keep" in takes else {}
        self._key_numbers = torch.arange(rounded(max_context, VIEW_STEP), device=self.device)
        self._zero = torch.zeros((), dtype=self.dtype, device=self.device)
        self._masked = torch.full((), torch.finfo(self.dtype).min, dtype=self.dtype, device=self.device)

    @torch.inference_mode()
    def prefill(self, first: int, sequences: Sequence[Sequence[int]], held: Sequence[int]) -> None:
        """Cache the keys and values of sequences in rows first.., each of at least one token.

        `held` counts the tokens before them that their rows hold already. They are padded on the
        right: a causal model's earlier positions never see the padding, and later steps overwrite it.
        """
        length = max(map(len, sequences))
        ids = np.zeros((len(sequences), length), np.int64)
        for row, sequence in enumerate(sequences):
            ids[row, : len(sequence)] = sequence
        if any(held):
            starts = torch.tensor(held, device=self.device)
            # Padding may reach beyond the context; its place there is written again before it is read.
            positions = (starts[:, None] + self._key_numbers[:length]).clamp_(max=self.max_context - 1)
            seen = rounded(min(max(held) + length, self.max_context), VIEW_STEP)
            self.cache.extend(first, positions, seen)
            self._attend(upload(ids, self.device), positions, seen)
            return
        self.cache.begin(first, len(sequences), length)
        self.hf_model(
            input_ids=upload(ids, self.device),
            position_ids=self._key_numbers[None, :length].expand(len(sequences), length),
            past_key_values=self.cache,
            use_cache=True,
            **self._keep_last,
        )

    @torch.inference_mode()
    def decode(self, slots: Slots) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        """One token for every row: (ids, logprobs), both [rows]."""
        return sample(self.logits(slots), slots)

    @torch.inference_mode()
    def logits(self, slots: Slots) -> Tensor:
        """The next token's logits for every row, [rows, vocab]; caches the rows' input tokens."""
        n = slots.count
        positions = upload(slots.lengths[:n, None], self.device)
        length = rounded(int(slots.lengths[:n].max()) + 1, VIEW_STEP)
        self.cache.extend(0, positions, length)
        return self._attend(upload(slots.tokens[:n, None], self.device), positions, length)

    def _attend(self, ids: Tensor, positions: Tensor, length: int) -> Tensor:
        """Run tokens [rows, tokens] at `positions` of the rows that the cache was told, each seeing its row's
        past among the first `length` keys.

        Returns the logits of the last column, [rows, vocab].
        """
        seen = self._key_numbers[:length] <= positions[:, :, None]
        output = self.hf_model(
            input_ids=ids,
            position_ids=positions,
            attention_mask=torch.where(seen, self._zero, self._masked)[:, None],
            past_key_values=self.cache,
            use_cache=True,
            **self._keep_last,
        )
        logits: Tensor = output.logits[:, -1]
        return logits

    @torch.inference_mode()
    def snapshot(self, row: int, length: int) -> RowSnapshot:
        return self.cache.snapshot(row, length)

    @torch.inference_mode()
    def restore(self, row: int, snapshot: RowSnapshot, length: int) -> None:
        self.cache.restore(row, snapshot, length)

    @torch.inference_mode()
    def move(self, source: int, target: int, length: int) -> None:
        self.cache.move(source, target, length)

    @torch.inference_mode()
    def clean(self, row: int) -> None:
        self.cache.clean(row)

    @torch.inference_mode()
    def drop_cache(self) -> None:
        self.cache.drop()

    def read_weights(self, directory: Path) -> CheckedWeights:
        """Read and check weights without touching the live ones; raises WeightsError."""
        return read_weights(self.hf_model, directory)

    def check_weights(self, tensors: Mapping[str, Tensor]) -> CheckedWeights:
        """Check weights that are in memory; raises WeightsError."""
        return check_weights(self.hf_model, (("what was sent", *one) for one in tensors.items()))

    def copy_weights(self, weights: CheckedWeights) -> None:
        copy_weights(weights)


def load_model(options: EngineOptions) -> Model:
    """Load a model directory, whose weights are held against their checksum where one was kept.

    Raises StartError in one sentence.
    """
    if not options.model.is_dir():
        raise StartError(f"{options.model}: there is no such model directory")
    if not (options.model / "config.json").is_file():
        raise StartError(f"{options.model} has no config.json: it is not a Hugging Face model directory")
    torch.set_num_threads(options.threads)
    hf_logging.disable_progress_bar()
    device = find_device("engine.device", options.device)
    hf_model = _pretrained(options)
    damage = checksum.fault_of(options.model)
    if damage is not None:
        raise StartError(damage)
    hf_model.requires_grad_(False).eval().to(device)
    model = Model(hf_model, options.max_slots, options.max_context)
    probe(model, options.model)
    return model


def _pretrained(options: EngineOptions) -> Any:
    """The model with all its weights, in CPU memory; raises StartError."""
    try:
        config = AutoConfig.from_pretrained(options.model, local_files_only=True)
        _attention_layers(config, options.max_context)
        _check_positions(config, options.max_context)
        hf_model, found = AutoModelForCausalLM.from_pretrained(
            options.model,
            config=config,
            dtype=getattr(torch, options.dtype),
            local_files_only=True,
            output_loading_info=True,
        )
    except StartError as error:
        raise StartError(f"{options.model}: {error}") from None
    except Exception as error:  # whatever transformers raises, the person needs one sentence
        raise StartError(f"{options.model}: the model cannot be loaded: {error}") from error
    for fault in ("missing_keys", "mismatched_keys"):
        if found.get(fault):
            names = sorted(str(name) for name in found[fault])
            raise StartError(f"{options.model}: {fault.replace('_', ' ')} in its weights: {names[:5]}")
    return hf_model


def _eos_ids(hf_model: Any) -> frozenset[int]:
    found: set[int] = set()
    for config in (hf_model.config, getattr(hf_model, "generation_config", None)):
        eos = getattr(config, "eos_token_id", None)
        found.update([eos] if isinstance(eos, int) else eos or [])
    return frozenset(found)


def _attention_layers(config: Any, max_context: int) -> list[Any]:
    """The layers of a standard attention cache; raises StartError where the model has another kind."""
    layers: list[Any] = DynamicCache(config=config).layers
    for index, layer in enumerate(layers):
        if type(layer) is DynamicLayer:
            continue
        if type(layer) is DynamicSlidingWindowLayer:
            if layer.sliding_window >= max_context:
                continue  # a window that no request outgrows is full attention
            raise StartError(
                f"layer {index} has a sliding window of {layer.sliding_window} tokens, which the embedded "
                f"engine does not serve beyond; set engine.max_context to at most that, or use SGLang"
            )
        raise StartError(
            f"layer {index} keeps a {type(layer).__name__}, not a standard attention cache; "
            "the embedded engine cannot serve this model, use SGLang"
        )
    if not layers:
        raise StartError("its config names no attention layers; the embedded engine cannot serve this model")
    return layers


def _check_positions(config: Any, max_context: int) -> None:
    positions = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    if isinstance(positions, int) and positions < max_context:
        raise StartError(
            f"engine.max_context = {max_context} is more than the model's {positions} positions "
            "(max_position_embeddings); lower it"
        )


def probe(model: Model, path: Path) -> None:
    """Compare the slot cache with the plain model once, on short sequences of different lengths.

    A model that ignores `position_ids` or a prepared mask would sample fluent nonsense; this says so
    at the start. Raises StartError.
    """
    tolerance = PROBE_TOLERANCE[model.dtype]
    try:
        worst = _probe_error(model)
    except (TypeError, ValueError, RuntimeError, AttributeError, IndexError) as error:
        raise StartError(f"{path}: the model does not run over the slot cache: {error}") from error
    finally:
        model.drop_cache()
    if not worst <= tolerance:
        raise StartError(
            f"{path}: over the slot cache its logits differ by {worst:.3g} from the plain model's; "
            "the embedded engine cannot serve this model, use SGLang"
        )


@torch.inference_mode()
def _probe_error(model: Model) -> float:
    """The largest difference of any logit, over two decode steps of a few rows."""
    slots = Slots(model.max_slots)
    for length in PROBE_LENGTHS[: model.max_slots]:
        ids = [(length + 7919 * i) % model.vocab_size for i in range(length)]
        generation = Generation(rid="", prompt_ids=ids, params=SamplingParams(), limit=2)
        slots.join(generation)
    for row, generation in enumerate(slots.owners[1:], 1):  # all in two pieces but the first
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
    return float(torch.stack(differences).max())  # NaN where any is
