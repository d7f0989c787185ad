"""The model's way forward: from laid-out rows to the logprobs of their trained tokens.

Axes in names: b rows, p prefixes, t positions, n trained tokens, h heads, d hidden, v vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache

from tidegate.config import TrainerSettings
from tidegate.errors import StartError
from tidegate.trainer.batch.rows import TrainSequence
from tidegate.trainer.policy.activation_checkpointing import recompute
from tidegate.trainer.policy.loss import token_logprobs
from tidegate.trainer.policy.microbatch import Microbatch, PrefixBatch, SharedPrefixes, bundles
from tidegate.types import Logprobs

LOGITS_AT_ONCE = 2**26
"""Logits kept for the backward pass; more than these are computed in pieces, and again on the way back
(a vocabulary of 150,000 would take 5 GB for 8,192 tokens)."""


class Prefix:
    """Keys and values of a bundle's prefixes, computed once.

    The microbatches that go on from them leave their gradients here; `backward` then takes the sum
    through the prefixes themselves. So the gradient is that of whole rows, and the graph of one
    microbatch at a time is held besides that of the prefixes.
    """

    def __init__(self, backbone: Any, prefixes: Sequence[SharedPrefixes], device: torch.device) -> None:
        width = max(one.ids_pt.shape[1] for one in prefixes)
        passes = [_keys_and_values(backbone, one.ids_pt.to(device)) for one in prefixes]
        self._computed = [
            torch.cat([pad(one, (0, 0, 0, width - one.shape[2])) for one in same])
            for same in zip(*passes, strict=True)
        ]
        self._given = [one.detach().requires_grad_(one.requires_grad) for one in self._computed]

    def cache(self, batch: Microbatch) -> DynamicCache:
        """The keys and values that each row of the microbatch goes on from."""
        cache = DynamicCache()
        chosen = [one.index_select(0, batch.prefix_b)[:, :, : batch.prefix_width] for one in self._given]
        for layer in range(len(chosen) // 2):
            cache.update(chosen[2 * layer], chosen[2 * layer + 1], layer)
        return cache

    def backward(self) -> None:
        """Call once, when the backward passes of all microbatches are done."""
        pairs = [
            (computed, given.grad)
            for computed, given in zip(self._computed, self._given, strict=True)
            if given.grad is not None  # what lies before the first trained parameter has none
        ]
        torch.autograd.backward([one for one, _ in pairs], [gradient for _, gradient in pairs])


class Forward:
    """A causal language model, taken apart so that only what is needed is computed.

    The head is applied only where a token is trained, and prefixes are computed once; each is done only
    for a model that gives the same result so, which is tried when it is made, in float32. Logprobs are
    computed in float32 from the logits, whatever these were computed in.

    Raises StartError where the model's layers are to be computed again and cannot be told.
    """

    def __init__(self, model: Any, settings: TrainerSettings) -> None:
        self.model = model
        self.device = next(model.parameters()).device
        self._autocast = False
        self._backbone, self._head = _split(model, self.device)
        self.shares = self._may_share()
        if settings.activation_checkpointing:
            recompute(_layers_to_recompute(model))
        self._compute_in(getattr(torch, settings.compute_dtype))

    def _compute_in(self, dtype: torch.dtype) -> None:
        """Compute in this type from now on; parameters and their gradients stay in float32."""
        self._autocast = dtype is torch.bfloat16

    def _precision(self) -> torch.autocast:
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self._autocast)

    def prefix(self, bundle: PrefixBatch) -> Prefix | None:
        """Compute the bundle's prefixes, if it has any."""
        with self._precision():
            return Prefix(self._backbone, bundle.prefixes, self.device) if bundle.prefixes else None

    def __call__(self, batch: Microbatch, prefix: Prefix | None) -> tuple[Tensor, Tensor]:
        """log π of the microbatch's trained tokens and the entropy of their distributions, both [n].

        The microbatch is on the model's device. Without a prefix there is no attention mask: padding is
        on the right, where causal attention of a real token never looks.
        """
        inputs: dict[str, Any] = {"input_ids": batch.ids_bt, "position_ids": batch.positions_bt}
        if prefix is None:
            inputs["use_cache"] = False
        else:
            inputs["use_cache"] = True
            inputs["past_key_values"] = prefix.cache(batch)
            inputs["attention_mask"] = _mask(batch)
        with self._precision():
            if self._head is None:
                logits_nv = self.model(**inputs).logits.flatten(0, 1).index_select(0, batch.at_n)
                return token_logprobs(logits_nv, batch.targets_n, batch.temperatures_n)
            hidden_btd = self._backbone(**inputs).last_hidden_state
            return self._through_head(hidden_btd.flatten(0, 1).index_select(0, batch.at_n), batch)

    def _through_head(self, hidden_nd: Tensor, batch: Microbatch) -> tuple[Tensor, Tensor]:
        def piece(hidden: Tensor, targets: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor]:
            return token_logprobs(self._head(hidden), targets, temperatures)

        size = max(1, LOGITS_AT_ONCE // self._head.weight.shape[0])
        if len(hidden_nd) <= size:
            return piece(hidden_nd, batch.targets_n, batch.temperatures_n)
        split = (torch.split(one, size) for one in (hidden_nd, batch.targets_n, batch.temperatures_n))
        pieces = [checkpoint(piece, *each, use_reentrant=False) for each in zip(*split, strict=True)]
        return torch.cat([one for one, _ in pieces]), torch.cat([one for _, one in pieces])

    @torch.no_grad()
    def logprobs(self, rows: Sequence[TrainSequence], max_tokens: int, *, share: bool) -> list[Logprobs]:
        """log π of every trained token; float32 [t] a row, 0 elsewhere."""
        found = [np.zeros(len(row.ids), dtype=np.float32) for row in rows]
        for bundle in bundles(rows, max_tokens, share=share):
            prefix = self.prefix(bundle)
            for batch in bundle.microbatches:
                logprobs_n, _ = self(batch.to(self.device), prefix)
                for index, values in by_row(batch, logprobs_n).items():
                    found[index][rows[index].mask] = values
        return found

    def _may_share(self) -> bool:
        """Whether rows may go on from prefixes."""
        return self._head is not None and _attends_to_all(self.model) and self._agrees()

    def _agrees(self) -> bool:
        """Whether rows that go on from prefixes get the logprobs of whole rows."""
        rows = _specimens(self.model.config.get_text_config().vocab_size)
        whole = self.logprobs(rows, 4096, share=False)
        try:
            shared = self.logprobs(rows, 4096, share=True)
        except (AttributeError, IndexError, NotImplementedError, RuntimeError, TypeError, ValueError):
            return False  # its cache or its mask is of another kind
        return all(np.allclose(one, other, atol=1e-4) for one, other in zip(whole, shared, strict=True))


def decoder_layers(model: Any) -> list[Any]:
    """The model's decoder layers, which transformers names as what must not be split."""
    names = set(model._no_split_modules or ())
    return [one for one in model.modules() if type(one).__name__ in names]


def _layers_to_recompute(model: Any) -> list[Any]:
    found = decoder_layers(model)
    if not found:
        raise StartError(
            f"{type(model).__name__} does not say what its decoder layers are, so they cannot be computed "
            "again: switch trainer.activation_checkpointing off, and lower trainer.microbatch_tokens"
        )
    return found


def by_row(batch: Microbatch, logprobs_n: Tensor) -> dict[int, Logprobs]:
    """The logprobs of each row's trained tokens, by its place in the batch."""
    values_n, row_n = logprobs_n.cpu(), batch.row_n.cpu()
    return {index: values_n[row_n == at].numpy() for at, index in enumerate(batch.rows)}


@torch.no_grad()
def _split(model: Any, device: torch.device) -> tuple[Any, Any]:
    """The model as (backbone, head), so that logits are computed only where a token is trained.

    (None, None) where head(backbone(ids)) is not what the model gives: some scale or cap their logits.
    """
    backbone, head = model.base_model, model.get_output_embeddings()
    if backbone is model or head is None:
        return None, None
    ids_bt = torch.arange(8, device=device)[None] % model.config.get_text_config().vocab_size
    whole = model(input_ids=ids_bt, use_cache=False).logits
    parts = head(backbone(input_ids=ids_bt, use_cache=False).last_hidden_state)
    return (backbone, head) if torch.allclose(whole, parts, atol=1e-5, rtol=1e-4) else (None, None)


def _attends_to_all(model: Any) -> bool:
    """Whether every layer attends to every earlier token, so that a prefix is its keys and values."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    return kinds == {"full_attention"} and getattr(config, "sliding_window", None) is None


def _specimens(vocabulary: int) -> list[TrainSequence]:
    """Rows that share two prefixes of different length and go on in replies of different length."""
    rows = []
    for beginning, replies in ((20, (3, 7, 5)), (33, (4, 4))):
        for number, reply in enumerate(replies):
            length = beginning + reply
            own = np.arange(length) >= beginning
            ids = (np.arange(length) * beginning + own * (number + 1)) % vocabulary
            ones = np.ones(length, dtype=np.float32)
            rows.append(
                TrainSequence(
                    ids.astype(np.int32), own, 0 * ones, np.zeros(length, dtype=np.int64), ones, 0 * ones
                )
            )
    return rows


def _keys_and_values(backbone: Any, ids_pt: Tensor) -> list[Tensor]:
    """Keys and values by layer, in turn; each [p, h, t, d]."""
    cache = DynamicCache()
    positions = torch.arange(ids_pt.shape[1], device=ids_pt.device).expand_as(ids_pt)
    backbone(input_ids=ids_pt, position_ids=positions, past_key_values=cache, use_cache=True)
    return [one for layer in cache.layers for one in (layer.keys, layer.values)]


def _mask(batch: Microbatch) -> Tensor:
    """bool [b, 1, t, prefix + t]: a token sees its row's prefix, not that one's padding, and what lies
    before it in its row."""
    rows, width = batch.ids_bt.shape
    device = batch.ids_bt.device
    seen = torch.arange(batch.prefix_width, device=device) < batch.starts_b[:, None]
    causal = torch.ones(width, width, dtype=torch.bool, device=device).tril()
    prefix = seen[:, None, None].expand(rows, 1, width, batch.prefix_width)
    return torch.cat([prefix, causal.expand(rows, 1, width, width)], dim=-1)
