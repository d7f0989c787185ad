"""One conversation with a Tinker service by its SDK: the calls that Tidegate makes, and how they fail.

`tests/tinker` holds it with a real service, and compares it with the recording; with
`TIDEGATE_TINKER_RECORD=1` it writes the recording. The quick suite holds it with the stand-in: so the
stand-in's replies have the fields and shapes, and its errors the types, of the real ones.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

RECORDING = Path(__file__).parent / "tinker" / "conversation.json"
LITERALS = ("type", "stop_reason", "dtype")
TIMEOUT_S = 300.0
T = TypeVar("T")


def recorded() -> list[dict[str, Any]]:
    exchanges: list[dict[str, Any]] = json.loads(RECORDING.read_text())["exchanges"]
    return exchanges


@dataclasses.dataclass
class Conversation:
    """Calls with the shapes of their replies, or the types of their errors."""

    exchanges: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def call(self, name: str, work: Callable[[], T]) -> T | None:
        try:
            value = work()
        except Exception as error:  # noqa: BLE001 - its type is recorded
            cause = error.__cause__
            status = getattr(error, "status_code", getattr(cause, "status_code", None))
            self.exchanges.append({"call": name, "error": type(error).__name__, "status": status})
            return None
        self.exchanges.append({"call": name, "reply": shape(value)})
        return value


def hold(
    tinker: Any,
    connect: Callable[[], Any],
    run: Callable[[Any], Any],
    base: str,
    kill: Callable[[], None],
    start: Callable[[], None],
) -> list[dict[str, Any]]:
    """Holds the conversation.

    Args:
        tinker: The SDK, or the stand-in.
        connect: Opens a session; calls are sent once.
        run: Runs a coroutine.
        base: Name of the base model.
        kill: Kills the service.
        start: Starts it again.
    """
    said = Conversation()
    call, service = said.call, connect()
    data = [_datum(tinker, [3, 4, 5]), _datum(tinker, [6, 7])]
    adam = tinker.AdamParams(
        learning_rate=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0, grad_clip_norm=1.0
    )
    sampling = tinker.SamplingParams(max_tokens=4, seed=1, stop=[], temperature=1.0, top_k=-1, top_p=1.0)

    def backward(session: Any, loss: str = "importance_sampling", timeout_s: float = TIMEOUT_S) -> Any:
        return session.forward_backward(data, loss, None).result(timeout_s)

    def sample(what: dict[str, str]) -> Any:
        async def sampled() -> Any:
            client = await service.create_sampling_client_async(**what)
            prompt = tinker.ModelInput.from_ints([3, 4])
            return await client.sample_async(prompt=prompt, num_samples=1, sampling_params=sampling)

        return run(sampled())

    session: Any = call(
        "create_lora_training_client",
        lambda: service.create_lora_training_client(base_model=base, rank=8, seed=1),
    )
    first: Any = call("save_state", lambda: session.save_state("first").result(TIMEOUT_S))
    call("forward_backward", lambda: backward(session))
    call("optim_step", lambda: session.optim_step(adam).result(TIMEOUT_S))
    sampler: Any = call(
        "save_weights_for_sampler", lambda: session.save_weights_for_sampler("one").result(TIMEOUT_S)
    )
    call("sample: snapshot", lambda: sample({"model_path": sampler.path}))
    call("sample: base model", lambda: sample({"base_model": base}))
    resumed: Any = call(
        "create_training_client_from_state_with_optimizer",
        lambda: service.create_training_client_from_state_with_optimizer(first.path),
    )
    call("forward_backward: resumed", lambda: backward(resumed))
    rest = service.create_rest_client()
    call("delete", lambda: rest.delete_checkpoint_from_tinker_path(sampler.path).result(TIMEOUT_S))
    call("forward_backward: unknown loss", lambda: backward(session, "none"))
    call("forward_backward: timeout", lambda: backward(session, timeout_s=0.0))
    call(
        "create_training_client_from_state_with_optimizer: unknown state",
        lambda: service.create_training_client_from_state_with_optimizer("tinker://none/weights/none"),
    )
    call("sample: unknown snapshot", lambda: sample({"model_path": "tinker://none/sampler_weights/none"}))
    call("save_state: idle", lambda: session.save_state("second").result(TIMEOUT_S))
    kill()
    call("forward_backward: service is away", lambda: backward(session))
    start()
    call("forward_backward: session before a restart", lambda: backward(session))
    service = connect()
    again: Any = call(
        "create_training_client_from_state_with_optimizer: after a restart",
        lambda: service.create_training_client_from_state_with_optimizer(first.path),
    )
    call("forward_backward: after a restart", lambda: backward(again))
    call("sample: snapshot before the restart", lambda: sample({"model_path": sampler.path}))
    retaken: Any = call(
        "save_weights_for_sampler: after a restart",
        lambda: again.save_weights_for_sampler("two").result(TIMEOUT_S),
    )
    call("sample: snapshot after a restart", lambda: sample({"model_path": retaken.path}))
    return said.exchanges


def _datum(tinker: Any, ids: list[int]) -> Any:
    def tensor(values: list[Any], dtype: str) -> Any:
        return tinker.TensorData(data=values, dtype=dtype, shape=[len(values)])

    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(ids),
        loss_fn_inputs={
            "target_tokens": tensor([*ids[1:], 8], "int64"),
            "logprobs": tensor([-1.0] * len(ids), "float32"),
            "advantages": tensor([0.5] * len(ids), "float32"),
        },
    )


def shape(value: Any, name: str = "") -> Any:
    """Describes a value: fields that are not None, numbers of items, types, and paths without their names."""
    if isinstance(value, str):
        path = re.fullmatch(r"tinker://[^/]+/(\w+/)?[^/]+", value)
        return f"tinker://RUN/{path[1] or ''}NAME" if path else value if name in LITERALS else "str"
    if isinstance(value, dict) and name == "metrics":
        return "dict"  # each service has its own
    if isinstance(value, dict):
        return {key: shape(one, key) for key, one in value.items()}
    if isinstance(value, list | tuple):
        items = [shape(one) for one in value]
        return [len(items), items[0]] if items and all(one == items[0] for one in items) else items
    if dataclasses.is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    elif hasattr(value, "model_dump"):
        value = {field: getattr(value, field) for field in type(value).model_fields}
    elif not isinstance(value, int | float | type(None)):
        return "client"
    else:
        return type(value).__name__
    if "service" in value:  # a client of the stand-in
        return "client"
    return {key: shape(one, key) for key, one in value.items() if one is not None}
