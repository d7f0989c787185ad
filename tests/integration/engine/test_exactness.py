"""The engine's samples agree with the plain model: ids, logprobs, versions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.integration.engine.engine_drive import Driver, plain_logprobs, worst_error
from tests.tiny import make_tiny_model
from tidegate.engine.model.model import Model, load_model
from tidegate.engine.options import EngineOptions
from tidegate.engine.requests.request import Generation
from tidegate.engine.scheduling import running_batch

TOLERANCE = 1e-4


def load(directory: Path, family: str) -> tuple[Model, Any]:
    plain = make_tiny_model(directory, family=family)
    return load_model(EngineOptions(directory, max_slots=8, max_context=256)), plain


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, Any]:
    return load(tmp_path_factory.mktemp("qwen3"), "qwen3")


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any], list[Path]]:
    """A model directory, and weights 0, 1 and 2 as models and as directories."""
    directories = [tmp_path_factory.mktemp(f"v{i}") for i in range(3)]
    models = [make_tiny_model(path, seed=10 + i) for i, path in enumerate(directories)]
    return directories[0], models, directories


@pytest.fixture
def model(versions: tuple[Path, list[Any], list[Path]]) -> Model:
    return load_model(EngineOptions(versions[0], max_slots=8, max_context=256))


def prompts(count: int, vocab: int = 97, low: int = 1, high: int = 60, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab, rng.integers(low, high)).tolist() for _ in range(count)]


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_mixed_lengths_that_join_and_leave_match_the_plain_model(tmp_path: Path, family: str) -> None:
    model, plain = load(tmp_path, family)
    driver = Driver(model)
    rng = np.random.default_rng(1)
    generations: list[Generation] = []
    temperatures: list[float] = []
    for i, prompt in enumerate(prompts(40)):  # five times the slots, fed in between the steps
        temperatures.append([1.0, 0.7, 1.6, 0.0][i % 4])
        generations.append(
            driver.submit(
                prompt,
                temperature=temperatures[-1],
                max_new_tokens=int(rng.integers(1, 50)),
                sampling_seed=i,
            )
        )
        for _ in range(int(rng.integers(0, 6))):
            driver.scheduler.run_once()
    driver.finish(generations)
    for generation, temperature in zip(generations, temperatures, strict=True):
        assert generation.error is None
        assert len(generation.output_ids) == generation.limit
        assert worst_error(plain, generation, temperature or 1.0) < TOLERANCE


def test_greedy_takes_the_likeliest_token(loaded: tuple[Model, Any]) -> None:
    model, plain = loaded
    driver = Driver(model)
    generations = [driver.submit(p, temperature=0, max_new_tokens=20) for p in prompts(6, seed=3)]
    driver.finish(generations)
    for generation in generations:
        ids = torch.tensor([generation.prompt_ids + generation.output_ids])
        with torch.no_grad():
            likeliest = plain(input_ids=ids).logits[0].argmax(-1)
        assert generation.output_ids == likeliest[len(generation.prompt_ids) - 1 : -1].tolist()


def test_same_seed_gives_the_same_tokens_alone_and_in_a_crowd(loaded: tuple[Model, Any]) -> None:
    model, _ = loaded
    crowd = Driver(model)
    given = [  # of different lengths, so that rows move
        {"prompt": prompt, "max_new_tokens": 10 + 7 * i % 23, "sampling_seed": i}
        for i, prompt in enumerate(prompts(20))
    ]
    together = [crowd.submit(**one) for one in given]
    crowd.finish(together)
    for i in range(20):
        alone = Driver(model)
        one = alone.submit(**given[i])
        alone.finish([one])
        assert one.output_ids == together[i].output_ids
    assert together[0].output_ids != together[1].output_ids


def test_draws_follow_the_distribution(loaded: tuple[Model, Any]) -> None:
    model, plain = loaded
    driver = Driver(model)
    prompt = [5, 3, 8]
    generations = [driver.submit(prompt, max_new_tokens=1, sampling_seed=i) for i in range(2000)]
    driver.finish(generations)
    drawn = np.bincount([g.output_ids[0] for g in generations], minlength=97) / len(generations)
    with torch.no_grad():
        expected = plain(input_ids=torch.tensor([prompt])).logits[0, -1].softmax(-1).numpy()
    deviation = np.abs(drawn - expected) / np.sqrt(expected * (1 - expected) / len(generations) + 1e-9)
    assert deviation.max() < 5


def test_a_retracted_request_continues_with_the_same_tokens(loaded: tuple[Model, Any]) -> None:
    model, plain = loaded
    undisturbed = Driver(model)
    expected = [undisturbed.submit(p, max_new_tokens=40, sampling_seed=i) for i, p in enumerate(prompts(12))]
    undisturbed.finish(expected)

    driver = Driver(model)
    scheduler = driver.scheduler
    got = [driver.submit(p, max_new_tokens=40, sampling_seed=i) for i, p in enumerate(prompts(12))]
    for steps in (3, 11, 20):
        driver.until(lambda steps=steps: max(len(g.output_ids) for g in got) >= steps)
        scheduler.pause("retract")
        assert scheduler.num_running == 0
        assert scheduler.num_waiting == sum(not g.ended for g in got)
        scheduler.resume()
    driver.finish(got)
    assert scheduler.counters.retractions > 0
    assert [g.output_ids for g in got] == [g.output_ids for g in expected]
    assert max(worst_error(plain, g) for g in got) < TOLERANCE


def test_a_request_frozen_in_place_continues_with_the_same_tokens_and_cache(
    loaded: tuple[Model, Any],
) -> None:
    model, _ = loaded
    undisturbed = Driver(model)
    expected = undisturbed.submit([1, 2, 3], max_new_tokens=20, sampling_seed=4)
    undisturbed.finish([expected])
    driver = Driver(model)
    got = driver.submit([1, 2, 3], max_new_tokens=20, sampling_seed=4)
    driver.until(lambda: len(got.output_ids) == 5)
    driver.scheduler.pause("in_place")
    assert driver.scheduler.num_running == 1
    driver.scheduler.call(driver.scheduler.resume)
    driver.finish([got])
    assert got.output_ids == expected.output_ids
    assert driver.scheduler.totals()["tokens_prefilled"] == 2
    assert got.kv_version is None


@pytest.mark.parametrize("paused", [True, False])
def test_spans_are_exact_and_logprobs_are_those_of_each_version(
    model: Model, versions: tuple[Path, list[Any], list[Path]], paused: bool
) -> None:
    """Weights change twice in mid-generation; every token is recomputed under its own version."""
    _, plain, directories = versions
    driver = Driver(model)
    scheduler = driver.scheduler
    generations = [driver.submit(p, max_new_tokens=12 + 2 * i) for i, p in enumerate(prompts(14))]
    seen: dict[str, list[int]] = {g.rid: [] for g in generations}
    for version, sampled in ((1, 60), (2, 150)):
        driver.until(lambda sampled=sampled: scheduler.counters.tokens_sampled >= sampled)
        for g in generations:
            seen[g.rid].append(len(g.output_ids))
        if paused:
            scheduler.pause("retract")
        weights = model.read_weights(directories[version])
        scheduler.load(weights, str(version), keep_cache=False, abort_all=False)
        scheduler.resume()
    driver.finish(generations)

    straddling = 0
    for g in generations:
        edges = [0, *seen[g.rid], len(g.output_ids)]
        expected = [(str(v), edges[v], edges[v + 1]) for v in range(3) if edges[v + 1] > edges[v]]
        assert g.spans == expected
        assert g.kv_version is None
        straddling += len(g.spans) > 1
        for version, start, end in g.spans:
            recomputed = plain_logprobs(plain[int(version)], g)[start:end]
            given = torch.tensor(g.logprobs[start:end], dtype=torch.float64)
            assert float((recomputed - given).abs().max()) < TOLERANCE
    assert straddling > 3


def test_a_cache_kept_across_an_update_says_how_old_it_is(
    model: Model, versions: tuple[Path, list[Any], list[Path]]
) -> None:
    _, plain, directories = versions
    driver = Driver(model, version="4")
    scheduler = driver.scheduler
    early = driver.submit([1, 2, 3, 4], max_new_tokens=20)
    driver.until(lambda: len(early.output_ids) == 6)
    for version in ("5", "6"):
        scheduler.pause("in_place")
        weights = model.read_weights(directories[1])
        scheduler.load(weights, version, keep_cache=True, abort_all=False)
    late = driver.submit([9, 8, 7], max_new_tokens=5)
    scheduler.call(scheduler.resume)
    driver.finish([early, late])
    assert early.kv_version == "4"
    assert early.spans == [("4", 0, 6), ("6", 6, 20)]
    assert (late.kv_version, late.spans) == (None, [("6", 0, 5)])
    assert worst_error(plain[1], late) < TOLERANCE


def test_in_place_with_a_flush_drops_the_cache(
    model: Model, versions: tuple[Path, list[Any], list[Path]]
) -> None:
    _, plain, directories = versions
    driver = Driver(model)
    scheduler = driver.scheduler
    generation = driver.submit([1, 2, 3, 4], max_new_tokens=12)
    driver.until(lambda: len(generation.output_ids) == 6)
    scheduler.pause("in_place")
    scheduler.load(model.read_weights(directories[1]), "1", keep_cache=False, abort_all=False)
    scheduler.call(scheduler.resume)
    driver.finish([generation])
    assert generation.kv_version is None
    given = torch.tensor(generation.logprobs[6:], dtype=torch.float64)
    assert float((plain_logprobs(plain[1], generation)[6:] - given).abs().max()) < TOLERANCE


def test_top_k_and_top_p_keep_to_the_likeliest_and_leave_neighbours_alone(loaded: tuple[Model, Any]) -> None:
    model, plain = loaded
    prompt = [4, 9, 2]
    with torch.no_grad():
        probs = plain(input_ids=torch.tensor([prompt])).logits[0, -1].softmax(-1)
    order = probs.argsort(descending=True)
    nucleus = int((probs[order].cumsum(0) - probs[order] <= 0.5).sum())

    driver = Driver(model)
    by_k = [driver.submit(prompt, top_k=3, max_new_tokens=1, sampling_seed=i) for i in range(200)]
    by_p = [driver.submit(prompt, top_p=0.5, max_new_tokens=1, sampling_seed=i) for i in range(200)]
    free = [driver.submit(prompt, max_new_tokens=1, sampling_seed=i) for i in range(200)]
    driver.finish([*by_k, *by_p, *free])
    assert {g.output_ids[0] for g in by_k} == set(order[:3].tolist())
    assert {g.output_ids[0] for g in by_p} == set(order[:nucleus].tolist())
    assert (
        max(worst_error(plain, g) for g in [*by_k[:20], *by_p[:20]]) < TOLERANCE
    )  # of the whole distribution

    alone = Driver(model)
    expected = [alone.submit(prompt, max_new_tokens=1, sampling_seed=i) for i in range(200)]
    alone.finish(expected)
    assert [g.output_ids for g in free] == [g.output_ids for g in expected]


def test_a_cache_is_kept_only_for_requests_that_were_paused_in_place(
    model: Model, versions: tuple[Path, list[Any], list[Path]]
) -> None:
    driver = Driver(model)
    generation = driver.submit([1, 2, 3, 4], max_new_tokens=12)
    driver.until(lambda: len(generation.output_ids) == 6)
    weights = model.read_weights(versions[2][1])
    driver.scheduler.load(weights, "1", keep_cache=True, abort_all=False)
    assert driver.scheduler.num_running == 0
    driver.finish([generation])
    assert generation.kv_version is None
    given = torch.tensor(generation.logprobs[6:], dtype=torch.float64)
    assert float((plain_logprobs(versions[1][1], generation)[6:] - given).abs().max()) < TOLERANCE


@pytest.mark.parametrize("prefix_bytes", [2**26, 0])
def test_turns_that_go_on_reuse_what_they_have_in_common(
    loaded: tuple[Model, Any], prefix_bytes: int
) -> None:
    """Two groups of four that begin alike, three turns each; some diverge in the middle."""
    model, plain = loaded
    driver = Driver(model, prefix_bytes=prefix_bytes)
    heads = prompts(2, low=50, high=51, seed=8)
    turns = [[driver.submit(head, max_new_tokens=9 + i, sampling_seed=i) for i in range(4)] for head in heads]
    everything = [one for group in turns for one in group]
    latest = everything
    for turn in range(2):
        driver.finish(latest)
        asked = [one.prompt_ids + one.output_ids + [turn, 3, 5] for one in latest]
        asked += [prompt[:37] + [1] * 9 for prompt in asked[:2]]
        latest = [driver.submit(prompt, max_new_tokens=11) for prompt in asked]
        everything = everything + latest
    driver.finish(everything)
    assert max(worst_error(plain, one) for one in everything) < TOLERANCE
    cached = [one.cached_tokens for one in everything]
    totals = driver.scheduler.totals()
    if prefix_bytes:
        assert sorted(cached[:8]) == [0, 0, *[49] * 6]  # whole prompts but for their last tokens
        assert cached[8:16] == [(len(one.past)) // 16 * 16 for one in everything[:8]]
        assert cached[16:18] == [32, 45]  # the second asks the same
        assert totals["tokens_reused"] > 3 * totals["tokens_prefilled"]
    else:
        assert (set(cached), totals["tokens_reused"]) == ({0}, 0)


def test_long_prompts_in_chunks_are_exact_and_say_what_was_cached(
    loaded: tuple[Model, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of 32 tokens between the steps of others; some begin where an earlier one was."""
    monkeypatch.setattr(running_batch, "CHUNK_TOKENS", 32)
    model, plain = loaded
    driver = Driver(model)
    talking = [driver.submit(prompt, max_new_tokens=60) for prompt in prompts(3, seed=5)]
    driver.until(lambda: all(one.output_ids for one in talking))
    long = prompts(3, low=150, high=180, seed=6)
    first = [driver.submit(prompt, max_new_tokens=10) for prompt in long]
    driver.finish(first)
    follow = [driver.submit(one.prompt_ids + one.output_ids + [4] * 40, max_new_tokens=10) for one in first]
    branch = driver.submit(long[0][:70] + [1] * 90, max_new_tokens=10)
    driver.finish([*talking, *follow, branch])
    assert driver.scheduler.counters.steps > 30  # they were decoding meanwhile
    assert [one.cached_tokens for one in first] == [0, 0, 0]
    assert [one.cached_tokens for one in follow] == [len(one.past) // 16 * 16 for one in first]
    assert branch.cached_tokens == 64
    assert max(worst_error(plain, one) for one in [*talking, *first, *follow, branch]) < TOLERANCE


def test_nothing_is_reused_across_versions(
    model: Model, versions: tuple[Path, list[Any], list[Path]]
) -> None:
    driver = Driver(model)
    prompt = prompts(1, low=50, high=51)[0]
    first = driver.submit(prompt, max_new_tokens=20)
    driver.finish([first])
    for mode, label in (("retract", "1"), ("in_place", None), ("in_place", "1")):
        driver.scheduler.pause(mode)
        weights = model.read_weights(versions[2][1])
        driver.scheduler.load(weights, label, keep_cache=True, abort_all=False)
        driver.scheduler.resume()
        second = driver.submit(prompt + first.output_ids, max_new_tokens=5)
        driver.finish([second])
        assert second.cached_tokens == 0
        assert worst_error(versions[1][1], second) < TOLERANCE
    third = driver.submit(prompt, max_new_tokens=5)
    driver.finish([third])
    assert third.cached_tokens > 0
    driver.scheduler.relabel("2")
    fourth = driver.submit(prompt, max_new_tokens=5)
    driver.finish([fourth])
    assert fourth.cached_tokens == 0


def test_keys_of_an_older_version_are_not_remembered(
    model: Model, versions: tuple[Path, list[Any], list[Path]]
) -> None:
    driver = Driver(model)
    prompt = prompts(1, low=50, high=51)[0]
    first = driver.submit(prompt, max_new_tokens=20)
    driver.until(lambda: len(first.output_ids) == 5)
    driver.scheduler.pause("in_place")
    weights = model.read_weights(versions[2][1])
    driver.scheduler.load(weights, "1", keep_cache=True, abort_all=False)
    driver.scheduler.call(driver.scheduler.resume)
    driver.finish([first])
    second = driver.submit(prompt + first.output_ids, max_new_tokens=5)
    driver.finish([second])
    assert (first.kv_version, second.cached_tokens, second.kv_version) == ("0", 0, None)
    assert worst_error(versions[1][1], second) < TOLERANCE


def test_rows_at_the_end_of_the_context_are_exact_beside_long_prefills(
    loaded: tuple[Model, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Padding of the short ones reaches beyond the context (256)."""
    model, plain = loaded
    driver = Driver(model)
    near = prompts(2, low=245, high=246, seed=2)
    first = [driver.submit(prompt, max_new_tokens=1) for prompt in near]
    driver.finish(first)
    late = [driver.submit([*prompt, 1, 2, 3], max_new_tokens=99) for prompt in near]
    others = [driver.submit(prompt, max_new_tokens=9) for prompt in prompts(4, low=25, high=26, seed=4)]
    driver.finish([*late, *others])
    assert caplog.records == []  # nothing had to be tried one by one
    assert [one.cached_tokens for one in late] == [240, 240]
    assert [len(one.output_ids) for one in late] == [8, 8]
    assert max(worst_error(plain, one) for one in [*late, *others]) < TOLERANCE


def test_values_that_are_not_finite_do_not_outlive_the_weights_that_gave_them(
    model: Model, versions: tuple[Path, list[Any], list[Path]]
) -> None:
    _, plain, _ = versions
    driver = Driver(model)
    prompt = prompts(1, low=50, high=51)[0]
    good = {name: tensor.clone() for name, tensor in model.hf_model.state_dict().items()}
    for tensor in model.hf_model.state_dict().values():
        tensor.fill_(float("nan"))
    bad = driver.submit(prompt, max_new_tokens=5)
    driver.finish([bad])
    assert bad.error is not None
    assert "not finite" in bad.error
    for name, tensor in model.hf_model.state_dict().items():  # behind the engine's back: no cache dropped
        tensor.copy_(good[name])
    after = [driver.submit(prompt[:n], max_new_tokens=5) for n in (3, 50)]
    driver.finish(after)
    assert max(worst_error(plain[0], one) for one in after) < TOLERANCE
