"""The state of a policy that a resumed run needs besides the weights, and its staged checkpoints."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor

from tidegate.errors import CheckpointError
from tidegate.trainer.checkpoint.checkpoint import OPTIMIZER
from tidegate.trainer.checkpoint.huggingface import cast, write_model
from tidegate.trainer.policy.lora import Adapter
from tidegate.trainer.policy.ranks import Ranks
from tidegate.trainer.policy.weights import PolicyWeights


@dataclass(frozen=True, slots=True)
class StagedPolicy:
    """A checkpoint of a policy on several ranks, between two of its steps.

    Attributes:
        model: The model, for its config and names; its values change meanwhile.
        values: The weights, gathered; empty except on rank 0.
        state: `trainer.pt`.
        shards: Where the ranks write the optimiser's moments; None before the first step, without any.
        wait: Waits until they have written.
    """

    model: Any
    tokenizer: Mapping[str, bytes]
    values: dict[str, Tensor]
    state: io.BytesIO
    shards: Path | None
    wait: Callable[[], None]

    def save_weights(self, directory: Path) -> Path:
        self.wait()  # first: if this fails, no rank writes any more
        write_model(directory, self.model, self.values, self.tokenizer, durable=False)
        return directory

    def save_state(self, path: Path) -> None:
        path.write_bytes(self.state.getbuffer())
        if self.shards is not None:
            self.shards.rename(path.with_name(OPTIMIZER))


@dataclass(frozen=True, slots=True)
class PolicyState:
    """Reads, stages and restores the state of a policy on its ranks: every rank calls the same method.

    It holds the optimiser, whose moments stay sharded, the step count, the random generators, and the
    adapter, which merged weights do not determine and which is gathered on rank 0.
    """

    model: Any
    optimizer: torch.optim.Optimizer
    adapter: Adapter | None
    weights: PolicyWeights
    ranks: Ranks
    device: torch.device

    def read(self, steps: int) -> dict[str, Any]:
        """Return the state after so many steps."""
        optimizer = self.optimizer.state_dict()
        optimizer["state"] = {index: dict(moments) for index, moments in optimizer["state"].items()}
        cuda = torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None
        state = {"optimizer": optimizer, "steps": steps, "rng": torch.get_rng_state(), "rng_cuda": cuda}
        if self.adapter is not None:
            state["adapter"] = self.ranks.gather(self.adapter.parameters(self.model))
        return state

    def stage(self, steps: int, tokenizer: Mapping[str, bytes], shards: Path) -> StagedPolicy:
        """Copy the weights and the state, and begin to write each rank's moments to `shards`."""
        values = cast(self.weights.in_files(), "float32")
        state, copied = self.read(steps), io.BytesIO()
        moments = {
            f"{index}.{name}": of_parameter.pop(name)
            for index, of_parameter in state["optimizer"]["state"].items()
            for name in [name for name, value in of_parameter.items() if value.ndim]  # not the step count
        }
        # Into memory: the state changes while the files are being written.
        torch.save({**state, "sharded": list(moments)}, copied)
        written = self.ranks.begin_save(moments, shards)
        return StagedPolicy(self.model, tokenizer, values, copied, shards if moments else None, written)

    def restore(self, path: Path) -> int:
        """Restore a state that any number of ranks wrote, and return its steps; raises CheckpointError.

        The moments that `stage` took out of it are beside it. `PolicyWeights.load` loads the weights.
        """

        def read() -> dict[str, Any]:
            # `weights_only`: a file in a checkpoint must not run code when it is read.
            state: dict[str, Any] = torch.load(
                path, map_location="cpu", weights_only=True, mmap=self.ranks.count > 1
            )
            return state

        try:
            return self._restore(self.ranks.outline(read), path.with_name(OPTIMIZER))
        except (OSError, RuntimeError, ValueError, LookupError, UnpicklingError) as error:
            raise CheckpointError(f"{path} is not a trainer state of this model: {error}") from error

    def _restore(self, state: dict[str, Any], shards: Path) -> int:
        if ("adapter" in state) != (self.adapter is not None):
            raise ValueError("trainer.lora.rank was switched on or off, which a resumed run does not allow")
        if self.adapter is not None:
            self.weights.copy_into(self.adapter.parameters(self.model), state["adapter"])
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        moments = {
            index: {name: self.ranks.shard(value, parameters[index]) for name, value in tensors.items()}
            for index, tensors in state["optimizer"]["state"].items()
        }
        sharded = {
            key: torch.empty_like(parameters[int(key.partition(".")[0])], requires_grad=False)
            for key in state.get("sharded", ())
        }
        if sharded:
            self.ranks.load_shards(sharded, shards)
        for key, value in sharded.items():
            index, _, name = key.partition(".")
            moments[int(index)][name] = value
        # The settings' own groups: a weight decay that was changed for the resumed run has an effect.
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": moments, "param_groups": groups})
        torch.set_rng_state(state["rng"].cpu())
        if state["rng_cuda"] is not None and self.device.type == "cuda":
            torch.cuda.set_rng_state(state["rng_cuda"].cpu(), self.device)
        steps: int = state["steps"]
        return steps
