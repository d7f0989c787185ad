"""The forward pass: computes the logprobs of the trained tokens of a microbatch.

Axes in names: b rows, p prefixes, t positions, n trained tokens, h heads, d hidden, v vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint
from transformers import Cache, DynamicCache

from tidegate.config import TrainerSettings
from tidegate.errors import StartError
from tidegate.trainer.batch.microbatch import Microbatch, PrefixBatch, SharedPrefixes
from tidegate.trainer.batch.packing import prefix_batches
from tidegate.trainer.batch.rows import TrainingSequence
from tidegate.trainer.batch.share import RankShare
from tidegate.trainer.policy.activation_checkpointing import checkpoint_layers
from tidegate.trainer.policy.attention import use_gpu_kernels
from tidegate.trainer.policy.head import TokenLogprobs, logprobs_in_pieces, narrowed, token_logprobs
from tidegate.trainer.policy.ranks import Compute, Ranks
from tidegate.trainer.policy.routing import RoutingReplay, normalises, use_autocast
from tidegate.trainer.policy.working_copy import WorkingCopy
from tidegate.turn import Logprobs
from tidegate.weights.float_logits import float_logits, is_plain
from tidegate.weights.internals import cache_argument
from tidegate.weights.onednn import use_onednn

LOGITS_AT_ONCE, LOGITS_AT_ONCE_ON_GPU = 2**26, 2**28
"""Largest number of logits in memory. More are computed in pieces, and again in the backward pass (with a
vocabulary of 150,000, 8,192 tokens would take 5 GB). On a GPU each piece costs a pass over the gradient of
the head."""
RECOMPILE_LIMIT = 64
"""Largest number of variants of a compiled layer."""


class Prefix:
    """Keys and values of shared prefixes, computed once.

    Microbatches accumulate gradients on detached copies; `backward` then propagates their sum through the
    prefixes. The gradient equals that of unshared rows, and only one microbatch's graph is in memory besides
    that of the prefixes.
    """

    def __init__(
        self,
        backbone: Any,
        prefixes: Sequence[SharedPrefixes],
        device: torch.device,
        replayed: Callable[[Tensor | None], AbstractContextManager[None]],
    ) -> None:
        # One width, so that a microbatch can select prefixes of several passes from one tensor.
        width = max(batch.ids_pt.shape[1] for batch in prefixes)
        passes = []
        for batch in prefixes:
            with replayed(batch.experts_ptm):
                passes.append(_keys_and_values(backbone, batch.ids_pt.to(device)))
        self._computed = [
            torch.cat([pad(tensor, (0, 0, 0, width - tensor.shape[2])) for tensor in tensors])
            for tensors in zip(*passes, strict=True)
        ]
        self._leaves = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in self._computed]

    def cache(self, batch: Microbatch) -> DynamicCache:
        """Return a cache with each row's prefix."""
        cache = DynamicCache()
        chosen = [leaf.index_select(0, batch.prefix_b)[:, :, : batch.prefix_width] for leaf in self._leaves]
        for layer in range(len(chosen) // 2):
            cache.update(chosen[2 * layer], chosen[2 * layer + 1], layer)
        return cache

    def backward(self) -> None:
        """Propagate the accumulated gradients. Call once, after the backward passes of all microbatches."""
        pairs = [
            (computed, leaf.grad)
            for computed, leaf in zip(self._computed, self._leaves, strict=True)
            if leaf.grad is not None  # layers before the first trained parameter have none
        ]
        torch.autograd.backward([computed for computed, _ in pairs], [gradient for _, gradient in pairs])


class Forward:
    """Forward pass of a causal LM that skips unneeded logits and computes shared prefixes once.

    Either optimisation is used only if a check at construction, in float32, gives the same results as the
    plain forward pass. Logits and logprobs are in float32, whatever the dtype of the products.

    Args:
        replays: Whether the rows' experts are replayed, if they have any.

    Attributes:
        replay: Replays the experts; None if they are not.

    Raises:
        StartError: if activation checkpointing is on and the model's layers cannot be identified, or experts
            are to be replayed that the model does not have, or that cannot be.
    """

    def __init__(self, model: Any, settings: TrainerSettings, ranks: Ranks, *, replays: bool = False) -> None:
        self.model = model
        self.device = next(model.parameters()).device
        self._ranks = ranks
        self._settings = settings
        self._one_length = ranks.one_length
        if settings.device != "cpu":
            use_gpu_kernels(model)
        if ranks.count == 1 and settings.pass_dtype == "float32":
            use_onednn(model)
        # In float32 until the checks below have compared results.
        self._autocast, self._dtype = False, torch.float32
        self.replay: RoutingReplay | None = None
        self._compute: Compute = self._compute_logprobs
        # Only rank 0 has values so far, so the others take over what it found.
        if ranks.agree(lambda: _can_split(model, self.device)):
            self._backbone, self._head = model.base_model, model.get_output_embeddings()
        else:
            self._backbone = self._head = None
        # Several ranks reshard each layer before the backward pass of a prefix would need it.
        self.shares = ranks.count == 1 and self._can_share()
        # Parameters and gradients stay in float32. Several ranks gather parameters in the compute dtype.
        self._dtype = getattr(torch, settings.pass_dtype)
        normalised = replays and ranks.outline(lambda: normalises(model))
        shortened = self._dtype is torch.bfloat16 and ranks.count == 1
        self._working: WorkingCopy | None = None
        if shortened and settings.device != "cpu" and self._head is not None and not settings.lora.rank:
            self._working = WorkingCopy(model, decoder_layers, self._dtype)
            self.model = model = self._working.model
            self._backbone, self._head = model.base_model, model.get_output_embeddings()
        elif shortened:
            self._autocast = True
            use_autocast(model)
        if replays:
            # Before the next two wrap `forward`: a layer that is computed again must get the same experts.
            self.replay = RoutingReplay(model, decoder_layers(model), normalised)
        if settings.compile:
            _compile_layers(decoder_layers(model))
        if settings.activation_checkpointing:
            checkpoint_layers(_layers_to_recompute(model))
        self._compute, self.device = ranks.shard_model(model, self._compute_logprobs, self._dtype)

    def _precision(self) -> torch.autocast:
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self._autocast)

    def refresh(self) -> None:
        """Take over the model's parameters, after they have changed."""
        if self._working is not None:
            self._working.refresh()

    def layout(self, share: RankShare) -> list[PrefixBatch]:
        """Group this rank's rows into microbatches."""
        return self._ranks.layout(share, share_prefixes=self.shares)

    def add_replicas(self, after_next: bool) -> None:
        """Set whether the next backward pass adds the replicas' gradients, or leaves that to a later one."""
        self._ranks.add_replicas(self._compute, after_next)

    def prefix(self, batch: PrefixBatch) -> Prefix | None:
        """Compute the batch's prefixes, if it has any."""
        with self._precision():
            if not batch.prefixes:
                return None
            return Prefix(self._backbone, batch.prefixes, self.device, self._replayed)

    def _replayed(self, experts: Tensor | None) -> AbstractContextManager[None]:
        if self.replay is None or experts is None:
            return nullcontext()
        return self.replay.experts(experts.to(self.device))

    def __call__(self, batch: Microbatch, prefix: Prefix | None) -> TokenLogprobs:
        """Return log π of the trained tokens, over their kept ids if they were recorded, and the entropy of
        their distributions over the whole vocabulary.

        The microbatch must be on the model's device.
        """
        scored: TokenLogprobs = self._compute(batch, prefix)
        return scored if batch.kept_nm is None else narrowed(scored, batch.kept_nm, batch.sampler_listed_nk)

    def _compute_logprobs(self, batch: Microbatch, prefix: Prefix | None) -> TokenLogprobs:
        """Without a prefix no attention mask is needed: padding is on the right, and attention is causal. Nor
        is one after prefixes of one length."""
        inputs: dict[str, Any] = {"input_ids": batch.ids_bt, "position_ids": batch.positions_bt}
        if prefix is None:
            inputs["use_cache"] = False
        else:
            inputs["use_cache"] = True
            inputs[cache_argument(self._backbone)] = prefix.cache(batch)
            if not self._one_length:
                inputs["attention_mask"] = _mask(batch)
        with self._precision(), self._replayed(batch.experts_btm):
            if self._head is None:
                logits_nv = self.model(**inputs).logits.flatten(0, 1).index_select(0, batch.at_n)
                return token_logprobs(logits_nv, *_targets(batch))
            hidden_btd = self._backbone(**inputs).last_hidden_state
            return self._through_head(hidden_btd.flatten(0, 1).index_select(0, batch.at_n), batch)

    def _through_head(self, hidden_nd: Tensor, batch: Microbatch) -> TokenLogprobs:
        def piece(hidden: Tensor, *targets: Tensor) -> TokenLogprobs:
            return token_logprobs(self._logits(hidden), *targets)

        most = LOGITS_AT_ONCE if self._settings.device == "cpu" else LOGITS_AT_ONCE_ON_GPU
        size = max(1, most // self._head.weight.shape[0])
        if len(hidden_nd) <= size:
            return piece(hidden_nd, *_targets(batch))
        if is_plain(self._head):
            return logprobs_in_pieces(
                hidden_nd,
                self._head.weight,
                self._dtype,
                size,
                *_targets(batch),
                compiled=self._settings.compile,
            )
        split = (torch.split(tensor, size) for tensor in (hidden_nd, *_targets(batch)))
        pieces = [checkpoint(piece, *inputs, use_reentrant=False) for inputs in zip(*split, strict=True)]
        logprobs, entropies, top = zip(*pieces, strict=True)
        return TokenLogprobs(
            torch.cat(logprobs),
            torch.cat(entropies),
            None if batch.other_ids_nk is None else torch.cat(top),
        )

    def _logits(self, hidden_nd: Tensor) -> Tensor:
        """Return the head's logits in float32, whatever the dtype of its products."""
        if self._dtype is torch.float32:
            return self._head(hidden_nd)  # type: ignore[no-any-return]
        if is_plain(self._head):
            return float_logits(hidden_nd, self._head.weight, self._dtype)
        with torch.autocast(self.device.type, enabled=False):  # a head with an adapter, say
            return self._head(hidden_nd.float())  # type: ignore[no-any-return]

    def logprobs(self, share: RankShare) -> list[Logprobs]:
        """Compute log π of every trained token of this rank's rows: a float32 [t] per row, 0 elsewhere."""
        result = [np.zeros(len(row.ids), dtype=np.float32) for row in share.rows]
        for index, values in self._by_row(self.layout(share)).items():
            result[index][share.rows[index].mask] = values
        return result

    @torch.no_grad()
    def _by_row(self, batches: Sequence[PrefixBatch]) -> dict[int, Logprobs]:
        """Compute log π of each row's trained tokens, by the row's index."""
        by_row: dict[int, Logprobs] = {}
        for prefix_batch in batches:
            prefix = self.prefix(prefix_batch)
            for batch in prefix_batch.microbatches:
                logprobs_n = self(batch.to(self.device), prefix).logprobs_n
                if not batch.idle:
                    values_n, row_n = logprobs_n.cpu(), batch.row_n.cpu()
                    by_row |= {index: values_n[row_n == at].numpy() for at, index in enumerate(batch.rows)}
        return by_row

    def _can_share(self) -> bool:
        """Whether rows may share prefixes."""
        return self._head is not None and _attends_to_all(self.model) and self._sharing_is_exact()

    def _sharing_is_exact(self) -> bool:
        """Whether sharing prefixes leaves the logprobs of probe rows unchanged."""
        rows = _probe_rows(self.model.config.get_text_config().vocab_size)
        expected = self._by_row(prefix_batches(rows, 4096, share=False))
        try:
            shared = self._by_row(prefix_batches(rows, 4096, share=True, one_length=self._one_length))
        except (AttributeError, IndexError, NotImplementedError, RuntimeError, TypeError, ValueError):
            return False  # the model has another kind of cache or mask
        return all(np.allclose(values, shared[index], atol=1e-4) for index, values in expected.items())


def _targets(batch: Microbatch) -> tuple[Tensor, ...]:
    """Return the arguments of `token_logprobs` after the logits."""
    given, others_nk = (batch.targets_n, batch.temperatures_n), batch.other_ids_nk
    return given if others_nk is None else (*given, others_nk)


def decoder_layers(model: Any) -> list[Any]:
    """Return the decoder layers, which transformers lists in `_no_split_modules`."""
    names = set(model._no_split_modules or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def _layers_to_recompute(model: Any) -> list[Any]:
    layers = decoder_layers(model)
    if not layers:
        raise StartError(
            f"{type(model).__name__} does not name its decoder layers (_no_split_modules), which activation "
            "checkpointing needs: switch trainer.activation_checkpointing off, and lower "
            "trainer.microbatch_tokens"
        )
    return layers


@torch.no_grad()
def _can_split(model: Any, device: torch.device) -> bool:
    """Whether head(backbone(ids)) are the model's logits, so that only those of trained tokens are computed.

    Some models scale or cap them.
    """
    backbone, head = model.base_model, model.get_output_embeddings()
    if backbone is model or head is None:
        return False
    ids_bt = torch.arange(8, device=device)[None] % model.config.get_text_config().vocab_size
    expected = model(input_ids=ids_bt, use_cache=False).logits
    logits = head(backbone(input_ids=ids_bt, use_cache=False).last_hidden_state)
    return torch.allclose(expected, logits, atol=1e-5, rtol=1e-4)


def _attends_to_all(model: Any) -> bool:
    """Whether every layer attends to all earlier tokens, so that keys and values fully describe a prefix."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    return kinds == {"full_attention"} and getattr(config, "sliding_window", None) is None


def _probe_rows(vocabulary: int) -> list[TrainingSequence]:
    """Build rows with two shared prefixes of different length and replies of different length."""
    rows = []
    for beginning, replies in ((20, (3, 7, 5)), (33, (4, 4))):
        for number, reply in enumerate(replies):
            length = beginning + reply
            own = np.arange(length) >= beginning
            ids = (np.arange(length) * beginning + own * (number + 1)) % vocabulary
            ones = np.ones(length, dtype=np.float32)
            rows.append(
                TrainingSequence(
                    ids.astype(np.int32), own, 0 * ones, np.zeros(length, dtype=np.int64), ones, 0 * ones
                )
            )
    return rows


def _keys_and_values(backbone: Any, ids_pt: Tensor) -> list[Tensor]:
    """Compute [keys, values, keys, values, …] by layer, each [p, h, t, d]."""
    cache = DynamicCache()
    positions = torch.arange(ids_pt.shape[1], device=ids_pt.device).expand_as(ids_pt)
    backbone(input_ids=ids_pt, position_ids=positions, use_cache=True, **{cache_argument(backbone): cache})
    return [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]


def _mask(batch: Microbatch) -> Tensor:
    """Attention mask, bool [b, 1, t, prefix + t]: a token sees its row's prefix without padding, and the
    row's tokens up to itself."""
    rows, width = batch.ids_bt.shape
    device = batch.ids_bt.device
    seen = torch.arange(batch.prefix_width, device=device) < batch.starts_b[:, None]
    causal = torch.ones(width, width, dtype=torch.bool, device=device).tril()
    prefix = seen[:, None, None].expand(rows, 1, width, batch.prefix_width)
    return torch.cat([prefix, causal.expand(rows, 1, width, width)], dim=-1)


def _compile_layers(layers: Iterable[Any]) -> None:
    """Compile these modules' forward, for inputs of any size: torch.compile joins elementwise operations.

    Wraps `forward` rather than the call, so that hooks, such as FSDP's, run outside. All layers share one
    compiled graph. With a cache, as for shared prefixes, a layer depends on its number and is not compiled.
    """
    # Kinds of layers, masks and gradient modes multiply to more than torch's 8 variants: others would run
    # uncompiled.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, RECOMPILE_LIMIT)
    for layer in layers:
        plain, compiled = layer.forward, torch.compile(layer.forward, dynamic=True)
        layer.forward = partial(_compiled_or_plain, plain, compiled)


def _compiled_or_plain(plain: Any, compiled: Any, *inputs: Any, **more: Any) -> Any:
    cached = any(isinstance(value, Cache) for value in more.values())
    return (plain if cached else compiled)(*inputs, **more)
