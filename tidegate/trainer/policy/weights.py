"""The weights of a policy: gathered from its ranks under the base model's names, published, and loaded."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tidegate.errors import CheckpointError, StartError
from tidegate.trainer.checkpoint.huggingface import as_in_files, cast, conversion_units
from tidegate.trainer.policy.lora import Adapter, base_name, is_adapter
from tidegate.trainer.policy.ranks import Ranks
from tidegate.weights.process_group import buckets


class PolicyWeights:
    """Reads and sets the weights of a model that ranks hold, together: every rank calls the same method.

    Args:
        model: the model; its parameters are sharded if there are several ranks.
        adapter: its LoRA matrices, merged into what is read; None without.
        ranks: the ranks that hold the model.
    """

    def __init__(self, model: Any, adapter: Adapter | None, ranks: Ranks) -> None:
        self._model = model
        self._adapter = adapter
        self._ranks = ranks

    def parameters(self) -> dict[str, Tensor]:
        """Return the parameters as published; of tied ones only the first. Empty except on rank 0."""
        return self._gathered(dict(self._model.named_parameters()))

    def in_files(self) -> dict[str, Tensor]:
        """Return the tensors of a checkpoint: buffers and all tied parameters too. Empty except on rank 0."""
        return self._gathered(self._model.state_dict(keep_vars=True))

    def buckets(
        self, max_bytes: int, as_files: str | None, *, on_device: bool
    ) -> Generator[dict[str, Tensor], None, None]:
        """Yield `parameters` in buckets; see `Policy.weight_buckets`."""
        live = dict(self._model.named_parameters())
        base = {base_name(name): value for name, value in live.items() if not is_adapter(name)}
        unit = conversion_units(self._model, base) if as_files is not None else str
        parts = (
            self._published({name: live[name] for name in names}, as_files, on_device)
            for names in buckets(live, max_bytes, lambda name: unit(base_name(name)))
        )
        try:
            for values in parts:
                if as_files is not None:
                    values = as_in_files(self._model, values)
                yield {name: value.contiguous() for name, value in values.items()}
        finally:
            # The other ranks gather every bucket, and wait for this rank in each.
            for _ in parts:
                pass

    @torch.no_grad()
    def _published(self, live: dict[str, Tensor], dtype: str | None, on_device: bool) -> dict[str, Tensor]:
        """Gather tensors in the published type; an adapter is merged in float32 before."""
        if dtype is not None and self._adapter is None:
            live = cast(live, dtype)
        values = self._gathered(live, on_device=on_device)
        if dtype is not None and self._adapter is not None:
            values = cast(values, dtype)
        return values if on_device else {name: value.cpu() for name, value in values.items()}

    def _gathered(self, live: Mapping[str, Tensor], *, on_device: bool = False) -> dict[str, Tensor]:
        """Gather tensors under the base model's names, with an adapter merged, which is in host memory."""
        values = self._ranks.gather(live, on_device=on_device)
        return values if self._adapter is None else self._adapter.merged(values)

    def load(self, directory: Path) -> None:
        """Load weights from files, or with an adapter compare them; raises CheckpointError if they differ."""
        try:
            values = self._ranks.read_model(directory).state_dict()
            if self._adapter is None:
                self.copy_into(self._model.state_dict(), values)
            else:
                self._compare(values)
        except (StartError, RuntimeError) as error:
            raise CheckpointError(f"{directory} does not hold this run's model: {error}") from error

    def _compare(self, values: Mapping[str, Tensor]) -> None:
        """Raises RuntimeError if the current weights differ from these."""
        own = self.in_files()
        same = all(name in values and values[name].equal(value.cpu()) for name, value in own.items())
        # Rank 0 alone has values to compare, and all ranks must raise.
        if not self._ranks.collect(same)[0]:
            raise RuntimeError(
                "the base model merged with the trainer's adapter has other weights; set model.path and "
                "trainer.lora.alpha as at the start of the run"
            )

    @torch.no_grad()
    def copy_into(self, live: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
        """Copy values into tensors; raises RuntimeError if names or shapes differ."""
        if live.keys() != values.keys():
            raise RuntimeError(f"tensor names differ: {', '.join(sorted(live.keys() ^ values.keys()))}")
        for name, tensor in live.items():
            if tensor.shape != values[name].shape:
                raise RuntimeError(f"{name}: {list(values[name].shape)} instead of {list(tensor.shape)}")
            # Into the same memory: the optimiser and a working copy hold these tensors.
            tensor.copy_(self._ranks.shard(values[name], tensor))
