"""Assigns the GPUs of one machine: the first to the trainer's ranks, the next to the run's engines.

On a machine with one GPU a single rank and the engines share it. On a cluster Ray assigns GPUs.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Sequence
from pathlib import Path

from tidegate.config import EngineSettings, Settings
from tidegate.errors import ConfigError

SIZES = (
    ("--tp-size", "--tensor-parallel-size", "--tp", "-tp"),
    ("--pp-size", "--pipeline-parallel-size", "--pp", "-pp"),
    ("--dp-size", "--data-parallel-size", "--dp", "-dp"),
)
"""Arguments of SGLang and vLLM whose values are multiplied: an engine's number of GPUs."""
FIRST, STEP = ("--base-gpu-id",), ("--gpu-id-step",)
"""Arguments by which SGLang's GPUs are chosen."""
VISIBLE = "CUDA_VISIBLE_DEVICES"
DRIVER = Path("/proc/driver/nvidia/gpus")


def visible_gpus() -> list[str]:
    """Return the names of the GPUs that a process of this machine sees, as CUDA_VISIBLE_DEVICES has them."""
    given = os.environ.get(VISIBLE)
    if given is None:
        return [str(index) for index, _ in enumerate(DRIVER.glob("*"))]
    names = (name.strip() for name in given.split(","))
    return list(itertools.takewhile(lambda name: name and not name.startswith("-"), names))


def only_visible(gpus: Sequence[int], names: Sequence[str]) -> dict[str, str]:
    """Return the variable by which a process sees only these of the named GPUs; none without GPUs."""
    return {VISIBLE: ",".join(names[gpu] for gpu in gpus)} if gpus else {}


def on_gpus(settings: Settings, gpus: Sequence[int]) -> Settings:
    """Return the settings with the device of an embedded engine that has these GPUs."""
    if not gpus:
        return settings
    engine = settings.engine.model_copy(update={"device": f"cuda:{gpus[0]}"})
    return settings.model_copy(update={"engine": engine})


def engine_gpus(settings: Settings, available: int) -> list[tuple[int, ...]]:
    """Return the GPUs of each engine that the run starts, and of each teacher, of `available` ones.

    Those on a CPU have none.

    Raises:
        ConfigError: ranks or engines would share a GPU that they must not share, or there are too few.
    """
    trainer, engine = settings.trainer, settings.engine
    teachers = sum(model.path is not None for model in trainer.teacher.models.values())
    named = [_named(engine, index) for index in range(0 if engine.urls else engine.count)]
    named += [_of_embedded(engine)] * teachers
    count = len(named)
    if available == 0:  # a missing GPU is refused by the name of its setting
        return [()] * count
    ranks = _ranks(settings)
    if len(ranks) > available:
        raise ConfigError(
            f"trainer.ranks = {trainer.ranks} need a GPU each, and this machine has {available}: lower "
            "trainer.ranks"
        )
    size = _size(engine)
    shared = available == 1 and len(ranks) <= 1
    taken = set(ranks).union(*filter(None, named))
    free = iter([0] * count if shared else [gpu for gpu in range(available) if gpu not in taken])
    found = [tuple(itertools.islice(free, size)) if gpus is None else gpus for gpus in named]
    if any(len(gpus) < size for gpus, given in zip(found, named, strict=True) if given is None):
        raise ConfigError(
            f"trainer.ranks = {trainer.ranks} and {count} engines need {len(ranks)} + {count} × {size} GPUs, "
            f"and this machine has {available}: lower engine.count or trainer.ranks, or name one GPU for all "
            'embedded engines (engine.device = "cuda:1")'
        )
    _check_shares(settings, ranks, found, by_name=not shared)
    return found


def chooses_gpus(engine: EngineSettings) -> bool:
    """Whether an argument of SGLang or vLLM chooses its GPUs among all visible ones."""
    return _value(engine.arguments, FIRST) is not None


def _check_shares(
    settings: Settings, ranks: Sequence[int], found: Sequence[tuple[int, ...]], *, by_name: bool
) -> None:
    """Raises ConfigError if a rank and an engine, or two servers, share a GPU without having been told to."""
    trainer, engine = settings.trainer, settings.engine
    where = "engine.device" if engine.kind == "embedded" else "--base-gpu-id in engine.arguments"
    for number, gpus in enumerate(found):
        for gpu in set(gpus).intersection(ranks):
            if trainer.publish_transport == "broadcast":
                raise ConfigError(
                    f"GPU {gpu} is used by trainer rank {ranks.index(gpu)} and by an engine, between which "
                    'trainer.publish_transport = "broadcast" cannot send weights: use another GPU, or "files"'
                )
            if by_name and (trainer.ranks > 1 or trainer.device == "cuda"):
                raise ConfigError(
                    f"{where} puts engine {number} on GPU {gpu}, which trainer rank {ranks.index(gpu)} uses: "
                    f"name another one, or leave it out (the trainer uses GPUs {ranks[0]} to {ranks[-1]})"
                )
        for other in found[:number] if engine.kind != "embedded" and by_name else ():
            if twice := set(gpus).intersection(other):
                raise ConfigError(
                    f"{where} puts several engines on GPU {min(twice)}: use {{index}}, the engine's number"
                )


def _ranks(settings: Settings) -> list[int]:
    """Return the GPUs of the trainer's ranks, by rank."""
    kind, _, index = settings.trainer.device.partition(":")
    if kind != "cuda":
        return []
    return [int(index)] if index else list(range(settings.trainer.ranks))


def _named(engine: EngineSettings, index: int) -> tuple[int, ...] | None:
    """Return the GPUs that the settings give an engine; None if they leave the choice."""
    if engine.kind == "embedded":
        return _of_embedded(engine)
    arguments = engine.numbered(index)
    if _value(arguments, ("--device",)) == "cpu":
        return ()
    first = _value(arguments, FIRST)
    if first is None or not first.isdecimal():
        return None
    step = int(_value(arguments, STEP) or 1)
    return tuple(int(first) + step * number for number in range(_size(engine)))


def _of_embedded(engine: EngineSettings) -> tuple[int, ...] | None:
    """Return the GPU of an embedded engine; None if the settings leave the choice."""
    kind, _, number = engine.device.partition(":")
    if kind != "cuda":
        return ()
    return (int(number),) if number else None


def _size(engine: EngineSettings) -> int:
    """Return the number of GPUs of one engine."""
    if engine.kind == "embedded":
        return 1
    sizes = SIZES[:-1] if "--enable-dp-attention" in engine.arguments else SIZES
    values = [_value(engine.arguments, names) or "1" for names in sizes]
    return math.prod(int(value) for value in values if value.isdecimal())


def _value(arguments: Sequence[str], names: Sequence[str]) -> str | None:
    """Return the value of a server's argument, given as `--name value` or `--name=value`."""
    words = [word for argument in arguments for word in argument.split("=", 1)]
    return next((value for name, value in itertools.pairwise(words) if name in names), None)
