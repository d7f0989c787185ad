"""A stand-in for the SDK `tinker` and its service, which keeps one number as the weights.

A gradient is the sum of the advantages, and a step adds it: weights show how often each step was taken.
With `Files` as its states the service outlives its process, and others reach it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, MutableMapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote, unquote


class RateLimitError(Exception):
    status_code = 429


class APIConnectionError(Exception):
    pass


class BadRequestError(Exception):
    status_code = 400


class NotFoundError(Exception):
    status_code = 404


class ValidationError(ValueError):
    pass


def failed_result(why: str) -> ValueError:
    """The error of a request that the service took and that failed."""
    error = ValueError(f"Error retrieving result: {why}")
    error.__cause__ = BadRequestError(why)
    return error


LOSSES = ("cross_entropy", "importance_sampling", "ppo", "cispo", "dro")


@dataclass
class ModelInput:
    ids: list[int]

    @classmethod
    def from_ints(cls, ids: list[int]) -> ModelInput:
        return cls(list(ids))


@dataclass
class TensorData:
    data: list[Any]
    dtype: str
    shape: list[int]


@dataclass
class Datum:
    model_input: ModelInput
    loss_fn_inputs: dict[str, TensorData]


@dataclass
class SamplingParams:
    max_tokens: int
    seed: int
    stop: list[int]
    temperature: float
    top_k: int
    top_p: float


@dataclass
class AdamParams:
    learning_rate: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    grad_clip_norm: float


@dataclass
class ForwardBackwardOutput:
    loss_fn_output_type: str
    loss_fn_outputs: list[dict[str, TensorData]]
    metrics: dict[str, float]


@dataclass
class OptimStepResponse:
    metrics: dict[str, float] | None = None


@dataclass
class SaveWeightsResponse:
    path: str
    type: str | None = None


@dataclass
class Sequence:
    stop_reason: str
    tokens: list[int]
    logprobs: list[float]


@dataclass
class SampleResponse:
    sequences: list[Sequence]
    type: str = "sample"


class Reply(Future[Any]):
    """A reply, or the error that it has in place of one; it takes a moment."""

    def __init__(self, value: Any = None) -> None:
        super().__init__()
        if isinstance(value, Exception):
            self.set_exception(value)
        else:
            self.set_result(value)

    def result(self, timeout: float | None = None) -> Any:
        if timeout == 0.0:
            raise TimeoutError
        return super().result(timeout)


class Files(MutableMapping[str, float]):
    """States of a service, each in a file of a directory."""

    def __init__(self, place: Path) -> None:
        self.place = place
        place.mkdir(parents=True, exist_ok=True)

    def _file(self, path: str) -> Path:
        return self.place / quote(path, safe="")

    def __getitem__(self, path: str) -> float:
        try:
            return float(self._file(path).read_text())
        except FileNotFoundError:
            raise KeyError(path) from None

    def __setitem__(self, path: str, weights: float) -> None:
        partial = self._file(f".{path}")
        partial.write_text(repr(weights))
        partial.replace(self._file(path))

    def __delitem__(self, path: str) -> None:
        self._file(path).unlink()

    def __iter__(self) -> Iterator[str]:
        return (unquote(file.name) for file in self.place.glob("tinker*"))

    def __len__(self) -> int:
        return sum(1 for _ in self)


@dataclass
class Service:
    """What the service keeps; `fault` is called after each call had its effect, and may raise."""

    states: MutableMapping[str, float] = field(default_factory=dict)
    deleted: list[str] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    fault: Callable[[int, str], None] = lambda number, name: None
    logprob: float = -1.0
    replies: list[list[int]] = field(default_factory=list)
    prompts: list[list[int]] = field(default_factory=list)
    params: list[SamplingParams] = field(default_factory=list)
    adam: list[AdamParams] = field(default_factory=list)
    gate: asyncio.Event | None = None
    holder: Any = field(default_factory=lambda: SimpleNamespace(execute_with_retries=None))
    random: Random = field(default_factory=Random)
    starts: int = 0
    """Sessions end with the start that opened them."""
    away: bool = False
    of_skyrl: bool = False
    """Whether paths of snapshots are those of skyrl-tx 0.3, which the SDK's call that deletes refuses."""
    taken: dict[str, int] = field(default_factory=dict)
    """The start in which a snapshot was taken; it is not sampled after another."""

    def after(self, name: str, value: Any = None) -> Reply:
        self.calls.append(name)
        self.fault(len(self.calls), name)
        return Reply(value)

    def restart(self) -> None:
        self.away, self.starts = False, self.starts + 1

    # -- the SDK's ServiceClient

    def create_lora_training_client(self, base_model: str, rank: int, seed: int) -> Training:
        return Training(self, 0.0)

    def create_training_client_from_state_with_optimizer(self, path: str) -> Training:
        if path not in self.states:
            raise NotFoundError(f"no state {path}")
        return Training(self, self.states[path])

    async def create_sampling_client_async(self, **what: str) -> Sampling:
        return Sampling(self, what)

    def create_rest_client(self) -> Service:
        return self

    def delete_checkpoint_from_tinker_path(self, path: str) -> Reply:
        if path.count("/") != 4:
            raise ValueError(f"Invalid tinker path: {path}")
        self.deleted.append(path)
        self.states.pop(path, None)
        return self.after("delete")


@dataclass
class Training:
    service: Service
    weights: float
    gradient: float = 0.0

    def __post_init__(self) -> None:
        self._start = self.service.starts

    def _check(self) -> None:
        if self.service.away:
            raise APIConnectionError("Connection error.")
        if self._start != self.service.starts:
            raise failed_result("the model is not loaded")

    def forward_backward(self, data: list[Datum], loss: str, config: Any) -> Reply:
        self._check()
        if loss not in LOSSES:
            raise ValidationError(f"loss_fn: {loss}")
        self.gradient += sum(sum(one.loss_fn_inputs["advantages"].data) for one in data)
        logprobs = [[self.service.logprob] * len(one.model_input.ids) for one in data]
        tensors = [TensorData(values, "float32", [len(values)]) for values in logprobs]
        outputs = [{"elementwise_loss": one, "logprobs": one} for one in tensors]
        return self.service.after("forward_backward", ForwardBackwardOutput("scalar", outputs, {}))

    def optim_step(self, params: AdamParams) -> Reply:
        self._check()
        self.service.adam.append(params)
        self.weights, self.gradient = self.weights + self.gradient, 0.0
        return self.service.after("optim_step", OptimStepResponse())

    def save_state(self, name: str) -> Reply:
        return self._save("save_state", SaveWeightsResponse(f"tinker://run/weights/{name}", "save_weights"))

    def save_weights_for_sampler(self, name: str) -> Reply:
        kind = "" if self.service.of_skyrl else "sampler_weights/"
        return self._save("save_weights_for_sampler", SaveWeightsResponse(f"tinker://run/{kind}{name}"))

    def _save(self, call: str, reply: SaveWeightsResponse) -> Reply:
        self._check()
        self.service.states[reply.path] = self.weights
        self.service.taken[reply.path] = self.service.starts
        return self.service.after(call, reply)


@dataclass
class Sampling:
    service: Service
    what: dict[str, str]

    async def sample_async(
        self, prompt: ModelInput, num_samples: int, sampling_params: SamplingParams
    ) -> SampleResponse:
        if (path := self.what.get("model_path")) is not None and path not in self.service.states:
            raise NotFoundError(f"no snapshot {path}")
        if path is not None and self.service.taken.get(path, self.service.starts) != self.service.starts:
            raise failed_result("the model is not loaded")
        self.service.prompts.append(prompt.ids)
        self.service.params.append(sampling_params)
        if self.service.gate is not None:
            await self.service.gate.wait()
        number, stop = sampling_params.max_tokens, sampling_params.stop
        if self.service.replies:
            ids = self.service.replies.pop(0)
        else:
            ids = [*(self.service.random.randrange(10, 200) for _ in range(number - 1)), *(stop[:1] or [9])]
        reason = "stop" if ids[-1] in stop else "length"
        return SampleResponse([Sequence(reason, ids, [-0.5] * len(ids))])
