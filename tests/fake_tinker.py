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
from typing import Any
from urllib.parse import quote, unquote


class RateLimitError(Exception):
    status_code = 429


class APIConnectionError(Exception):
    pass


class BadRequestError(Exception):
    status_code = 400


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
class Result:
    path: str = ""
    loss_fn_outputs: list[dict[str, TensorData]] = field(default_factory=list)


@dataclass
class Sequence:
    tokens: list[int]
    logprobs: list[float]


@dataclass
class SampleResponse:
    sequences: list[Sequence]


def done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


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
    gate: asyncio.Event | None = None

    def after(self, name: str, value: Any = None) -> Future[Any]:
        self.calls.append(name)
        self.fault(len(self.calls), name)
        return done(Result() if value is None else value)

    # -- the SDK's ServiceClient

    def create_lora_training_client(self, base_model: str, rank: int, seed: int) -> Training:
        return Training(self, 0.0)

    def create_training_client_from_state_with_optimizer(self, path: str) -> Training:
        if path not in self.states:
            raise BadRequestError(f"no state {path}")
        return Training(self, self.states[path])

    async def create_sampling_client_async(self, **what: str) -> Sampling:
        return Sampling(self, what)

    def create_rest_client(self) -> Service:
        return self

    def delete_checkpoint_from_tinker_path(self, path: str) -> Future[Any]:
        self.deleted.append(path)
        self.states.pop(path, None)
        return self.after("delete")


@dataclass
class Training:
    service: Service
    weights: float
    gradient: float = 0.0

    def forward_backward(self, data: list[Datum], loss: str, config: Any) -> Future[Any]:
        self.gradient += sum(sum(one.loss_fn_inputs["advantages"].data) for one in data)
        logprobs = [[self.service.logprob] * len(one.model_input.ids) for one in data]
        outputs = [{"logprobs": TensorData(values, "float32", [len(values)])} for values in logprobs]
        return self.service.after("forward_backward", Result(loss_fn_outputs=outputs))

    def optim_step(self, params: AdamParams) -> Future[Any]:
        self.weights, self.gradient = self.weights + self.gradient, 0.0
        return self.service.after("optim_step")

    def save_state(self, name: str) -> Future[Any]:
        path = f"tinker://run/weights/{name}"
        self.service.states[path] = self.weights
        return self.service.after("save_state", Result(path=path))

    def save_weights_for_sampler(self, name: str) -> Future[Any]:
        path = f"tinker://run/sampler_weights/{name}"
        self.service.states[path] = self.weights
        return self.service.after("save_weights_for_sampler", Result(path=path))


@dataclass
class Sampling:
    service: Service
    what: dict[str, str]

    async def sample_async(
        self, prompt: ModelInput, num_samples: int, sampling_params: SamplingParams
    ) -> SampleResponse:
        self.service.prompts.append(prompt.ids)
        self.service.params.append(sampling_params)
        if self.service.gate is not None:
            await self.service.gate.wait()
        ids = self.service.replies.pop(0)
        return SampleResponse([Sequence(ids, [-0.5] * len(ids))])
