"""Recorded decode steps give what steps give that run kernel by kernel, whatever happens between them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.integration.engine.engine_drive import Driver, worst_error
from tests.tape import Tapes
from tests.tiny import make_tiny_model
from tidegate.engine.model.decode import Recorded, Size
from tidegate.engine.model.model import Model, load_model, probe
from tidegate.engine.options import EngineOptions
from tidegate.engine.requests.request import Generation
from tidegate.engine.scheduling import running_batch

SLOTS, CONTEXT = 8, 256


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], list[Path]]:
    directories = [tmp_path_factory.mktemp(f"v{i}") for i in range(2)]
    return [make_tiny_model(path, seed=20 + i) for i, path in enumerate(directories)], directories


@pytest.fixture
def eager(versions: tuple[list[Any], list[Path]]) -> Model:
    return load_model(EngineOptions(versions[1][0], max_slots=SLOTS, max_context=CONTEXT))


@pytest.fixture
def tapes() -> Tapes:
    return Tapes()


def recording(versions: tuple[list[Any], list[Path]], recorder: Callable[[], Any]) -> Model:
    """The same model with weights of its own, its steps recorded."""
    _, directories = versions
    hf_model = load_model(EngineOptions(directories[0], max_slots=SLOTS, max_context=CONTEXT)).hf_model
    return Model(hf_model, SLOTS, CONTEXT, recorder)


@pytest.fixture
def recorded(versions: tuple[list[Any], list[Path]], tapes: Tapes) -> Model:
    return recording(versions, tapes)


def prompts(count: int, low: int, high: int, seed: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 97, rng.integers(low, high)).tolist() for _ in range(count)]


def ask(driver: Driver, asked: Sequence[Sequence[int]], **params: Any) -> list[Generation]:
    return [driver.submit(prompt, **({"sampling_seed": i} | params)) for i, prompt in enumerate(asked)]


Play = Callable[[Driver], Sequence[Generation]]


def the_same(eager: Model, recorded: Model, play: Play) -> list[Generation]:
    """Play it on both; returns the recorded one's requests."""
    expected, found = list(play(Driver(eager))), list(play(Driver(recorded)))
    for one, other in zip(expected, found, strict=True):
        assert other.error is None
        assert other.output_ids == one.output_ids
        assert other.spans == one.spans
        assert np.abs(np.array(other.logprobs) - one.logprobs).max(initial=0) < 1e-4
    return found


def test_requests_of_all_kinds_that_join_and_leave(eager: Model, recorded: Model, tapes: Tapes) -> None:
    kinds: list[dict[str, Any]] = [{}, {"temperature": 0}, {"temperature": 0.6}, {"top_k": 5}]
    kinds += [{"frequency_penalty": 0.7}, {"min_p": 0.1, "temperature": 1.3}]

    def play(driver: Driver) -> list[Generation]:
        rng = np.random.default_rng(1)
        requests = []
        for i, prompt in enumerate(prompts(24, 1, 90, seed=1)):
            # First those that need nothing but a draw, then all together.
            kind = kinds[i % 3] if i < 8 else kinds[i % len(kinds)]
            tokens = int(rng.integers(1, 40))
            requests.append(driver.submit(prompt, sampling_seed=i, max_new_tokens=tokens, **kind))
            for _ in range(int(rng.integers(0, 5))):
                driver.scheduler.turn()
        driver.finish(requests)
        return requests

    the_same(eager, recorded, play)
    assert isinstance(recorded.steps, Recorded)
    assert len({size.rows for size in recorded.steps.sizes}) > 2
    assert tapes.replayed > 3 * tapes.recorded


def test_a_padding_row_leaves_a_half_computed_prompt_alone(
    eager: Model, recorded: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five decode in a size of eight, so three are padding; the sixth row is being prefilled meanwhile."""
    monkeypatch.setattr(running_batch, "CHUNK_TOKENS", 16)

    def play(driver: Driver) -> list[Generation]:
        talking = ask(driver, prompts(5, 3, 9, seed=3), max_new_tokens=60)
        driver.until(lambda: all(one.output_ids for one in talking))
        long = driver.submit(prompts(1, 150, 151, seed=4)[0], max_new_tokens=30, sampling_seed=9)
        driver.finish([*talking, long])
        return [*talking, long]

    the_same(eager, recorded, play)


def test_rows_that_come_after_padding_find_nothing_of_it(eager: Model, recorded: Model) -> None:
    """The row that padding writes to is taken next, also by a prompt that needs no prefill."""

    def play(driver: Driver) -> list[Generation]:
        requests = ask(driver, prompts(3, 3, 9, seed=5), max_new_tokens=50)
        driver.until(lambda: all(len(one.output_ids) > 3 for one in requests))
        for prompt in ([7], [8], *prompts(3, 2, 30, seed=6)):
            requests += ask(driver, [prompt], max_new_tokens=12)
            driver.until(lambda: len(requests[-1].output_ids) > 2)  # noqa: B023 - called at once
        driver.finish(requests)
        return requests

    the_same(eager, recorded, play)


def test_what_is_recorded_follows_a_cache_that_grows(eager: Model, recorded: Model, tapes: Tapes) -> None:
    def play(driver: Driver) -> list[Generation]:
        short = ask(driver, prompts(2, 3, 9, seed=7), max_new_tokens=100, sampling_seed=1)
        driver.until(lambda: len(short[0].output_ids) > 5)
        long = driver.submit(prompts(1, 200, 201, seed=8)[0], max_new_tokens=3, sampling_seed=9)
        driver.finish([*short, long])  # longer rows; then, back at the first sizes, more of them
        more = ask(driver, prompts(8, 3, 40, seed=9), max_new_tokens=20)
        driver.finish(more)
        return [*short, long, *more]

    before = recorded.cache.moves
    the_same(eager, recorded, play)
    assert recorded.cache.moves > before
    assert tapes.recorded > len(recorded.steps.sizes)  # type: ignore[union-attr]


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_new_weights_are_those_that_a_recorded_step_reads(
    eager: Model, recorded: Model, tapes: Tapes, versions: tuple[list[Any], list[Path]], mode: Any
) -> None:
    plain, directories = versions

    def play(driver: Driver) -> list[Generation]:
        requests = ask(driver, prompts(5, 3, 9, seed=10), max_new_tokens=30)
        for version in (1, 0, 1):
            count = len(requests[0].output_ids)
            driver.until(lambda count=count: len(requests[0].output_ids) == count + 6)
            driver.scheduler.pause(mode)
            weights = driver.model.read_weights(directories[version])
            driver.scheduler.load(weights, str(version + 1), keep_cache=True, abort_all=False)
            driver.scheduler.call(driver.scheduler.resume)
        driver.finish(requests)
        late = driver.submit([5, 6, 7], max_new_tokens=20, sampling_seed=9)
        driver.finish([late])
        return [*requests, late]

    found = the_same(eager, recorded, play)
    assert worst_error(plain[1], found[-1]) < 1e-4
    # At first, once there is a cache, and once it has room for padding; not for weights or pauses.
    assert tapes.recorders == 3


def test_values_that_are_not_finite_are_not_left_in_memory_that_is_kept(
    recorded: Model, versions: tuple[list[Any], list[Path]]
) -> None:
    plain, _ = versions
    driver = Driver(recorded)
    good = {name: tensor.clone() for name, tensor in recorded.hf_model.state_dict().items()}
    for tensor in recorded.hf_model.state_dict().values():
        tensor.fill_(float("nan"))
    [bad] = [driver.submit(prompts(1, 50, 51, seed=11)[0], max_new_tokens=5)]
    driver.until(lambda: driver.scheduler.num_running == 1)
    driver.scheduler.load(recorded.check_weights(good), "1", keep_cache=False, abort_all=True)
    after = ask(driver, prompts(3, 3, 9, seed=12), max_new_tokens=5)
    driver.finish([bad, *after])
    assert max(worst_error(plain[0], one) for one in after) < 1e-4


class Refusal:
    """Records so many steps, and then no more."""

    def __init__(self, left: int) -> None:
        self.left = left
        self.tapes = Tapes()

    def __call__(self) -> Any:
        record = self.tapes()

        def refuse(run: Callable[[], object]) -> Any:
            self.left -= 1
            if self.left < 0:
                raise RuntimeError("operation not permitted when stream is capturing")
            return record(run)

        return refuse


@pytest.mark.parametrize("left", [0, 1])
def test_steps_that_cannot_be_recorded_run_kernel_by_kernel_and_the_log_says_so_once(
    eager: Model, versions: tuple[list[Any], list[Path]], caplog: pytest.LogCaptureFixture, left: int
) -> None:
    def play(driver: Driver) -> list[Generation]:
        requests = ask(driver, prompts(3, 3, 9, 13), max_new_tokens=9)
        requests += ask(driver, prompts(2, 30, 60, 13), max_new_tokens=20)
        driver.finish(requests)
        return requests

    model = recording(versions, Refusal(left))
    with caplog.at_level(logging.WARNING, logger="tidegate.engine"):
        the_same(eager, model, play)
    [line] = [one.getMessage() for one in caplog.records]
    assert "not permitted when stream is capturing" in line
    assert model.steps.sizes == []  # type: ignore[union-attr]


def test_what_replays_wrongly_is_found_at_the_start_and_given_up(
    eager: Model, versions: tuple[list[Any], list[Path]], caplog: pytest.LogCaptureFixture
) -> None:
    once = recording(versions, lambda: lambda run: (run(), lambda: None)[1])  # replays do nothing
    probe(once, Path("model"))
    assert ["replayed, their logits differ by" in one.getMessage() for one in caplog.records] == [True]

    def play(driver: Driver) -> list[Generation]:
        requests = ask(driver, prompts(2, 3, 9, 14), max_new_tokens=9)
        driver.finish(requests)
        return requests

    the_same(eager, once, play)


WAITS = ("cpu", "item", "tolist", "nonzero", "__bool__", "__int__", "__float__", "__index__")
"""What reads a tensor's values on the host."""


class Waits:
    """Counts what waits for the device."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        for name in WAITS:
            monkeypatch.setattr(torch.Tensor, name, self._counted(getattr(torch.Tensor, name)))

    def _counted(self, method: Any) -> Any:
        def counted(tensor: torch.Tensor) -> Any:
            self.count += 1
            return method(tensor)

        return counted


@pytest.mark.parametrize("kind", [{}, {"temperature": 0}, {"top_k": 5}, {"presence_penalty": 0.5}])
def test_a_step_waits_for_the_device_once(
    eager: Model, recorded: Model, monkeypatch: pytest.MonkeyPatch, kind: dict[str, Any]
) -> None:
    for model in (eager, recorded):
        driver = Driver(model)
        requests = ask(driver, prompts(3, 3, 9, seed=15), max_new_tokens=30, **kind)
        driver.until(lambda requests=requests: len(requests[0].output_ids) == 3)
        with monkeypatch.context() as patch:
            waits = Waits(patch)
            before = driver.scheduler.counters.steps
            driver.until(lambda requests=requests: len(requests[0].output_ids) == 9)
        assert waits.count == driver.scheduler.counters.steps - before == 6


@given(st.integers(1, 256), st.integers(1, 5000), st.integers(1, 256), st.integers(16, 5000))
def test_a_size_has_room_and_wastes_little(count: int, length: int, max_rows: int, context: int) -> None:
    max_rows, context = max(max_rows, count), max(context, length)
    size = Size.holding(count, length, max_rows, context)
    assert count <= size.rows <= max_rows
    assert length <= size.length < context + 16
    assert size.rows < 2 * count
    assert size.length <= max(length + 63, 1.25 * length)
    assert size.length % 16 == 0
    assert Size.holding(size.rows, size.length, max_rows, max(context, size.length)) == size
