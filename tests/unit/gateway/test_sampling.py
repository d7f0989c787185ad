"""Sampling: the session's parameters in training, the agent's in evaluation; budgets are never exceeded."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from tidegate.gateway.dialects import fields
from tidegate.gateway.errors import ApiError, refused_by_engine
from tidegate.gateway.sampling import (
    RequestedSampling,
    SamplingRules,
    Schema,
    narrows,
    token_budget,
    turn_seed,
)
from tidegate.types import Sampling


def test_in_training_the_session_overrides_the_agent_and_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rules = SamplingRules([2])
    requested = RequestedSampling(temperature=0.2, top_p=0.5, top_k=3, penalties={"frequency_penalty": 1.0})
    with caplog.at_level(logging.WARNING):
        for turn in range(3):
            params = rules.params(requested, Sampling(1.0), "sums", "train", None, turn)
    assert params == {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "stop_token_ids": [2]}
    [record] = caplog.records
    assert "temperature = 0.2" in record.getMessage()
    assert "frequency_penalty = 1.0" in record.getMessage()


def test_nothing_is_said_where_the_agent_asks_for_what_it_gets(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        SamplingRules([]).params(RequestedSampling(temperature=1.0), Sampling(1.0), "sums", "train", None, 0)
    assert not caplog.records


def test_in_evaluation_the_agent_is_honoured() -> None:
    rules = SamplingRules([2])
    asked = rules.params(RequestedSampling(0.2, 0.5, 3), Sampling(0.7), "sums", "eval", None, 0)
    assert (asked["temperature"], asked["top_p"], asked["top_k"]) == (0.2, 0.5, 3)
    silent = rules.params(RequestedSampling(), Sampling(0.0), "sums", "eval", None, 0)
    assert silent["temperature"] == 0.0
    penalised = rules.params(RequestedSampling(penalties={"min_p": 0.1}), Sampling(), "sums", "eval", None, 0)
    assert penalised["min_p"] == 0.1


def test_a_session_may_narrow_its_sampling_and_leave_that_to_the_agent(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The agent's temperature and penalties stay without effect, and top-k is bounded."""
    rules = SamplingRules([2])
    own = Sampling(top_p=0.9, top_k=40, min_p=0.02)
    requested = RequestedSampling(0.2, 0.5, 3, penalties={"min_p": 0.1, "presence_penalty": 1.0})
    with caplog.at_level(logging.WARNING):
        params = rules.params(requested, own, "sums", "train", None, 0)
        assert (params["top_p"], params["top_k"], params["min_p"]) == (0.9, 40, 0.02)
        assert "min_p = 0.1" in caplog.records[0].getMessage()
        params = rules.params(requested, replace(own, narrowed_by_agents=True), "sums", "train", None, 0)
    assert (params["temperature"], params["top_p"], params["top_k"], params["min_p"]) == (1.0, 0.5, 3, 0.1)
    assert "presence_penalty" not in params
    assert "the agent's temperature = 0.2, presence_penalty = 1.0 have" in caplog.records[1].getMessage()
    neutral = fields.sampling({"top_p": 1, "min_p": 0})
    params = rules.params(neutral, replace(own, narrowed_by_agents=True), "sums", "train", None, 0)
    assert (params["top_p"], params.get("min_p", 0)) == (1, 0), "asked for, as any other value"
    free = Sampling(narrowed_by_agents=True)
    assert not narrows(rules.params(RequestedSampling(), free, "sums", "train", None, 0))
    bounded = rules.params(RequestedSampling(top_p=0.5), free, "sums", "train", None, 0)
    assert narrows(bounded)
    assert bounded["top_k"] == 512
    with pytest.raises(ApiError, match="top_k = 5000: in training it must be at most 1024"):
        rules.params(RequestedSampling(top_k=5000), free, "sums", "train", None, 0)
    assert rules.requested_params(requested, "train", narrowed_by_agents=True) == {
        name: name for name in ("min_p", "top_k", "top_p")
    }


def test_what_the_engine_may_refuse_is_named_as_the_agent_named_it() -> None:
    requested = RequestedSampling(
        0.5,
        stop=["x"],
        stop_param="stop_sequences",
        penalties={"min_p": 2.0},
        schema=Schema("text.format", "{}"),
    )
    assert SamplingRules([]).requested_params(requested, "eval") == {
        "temperature": "temperature",
        "min_p": "min_p",
        "stop": "stop_sequences",
        "json_schema": "text.format",
    }
    assert SamplingRules([]).requested_params(requested, "train") == {
        "stop": "stop_sequences"
    }  # the rest is the session's


@pytest.mark.parametrize(
    ("reason", "param"),
    [
        ("sampling_params.stop = ['x']: no tokenizer", "stop_sequences"),
        ("stop_token_ids: it is a list", None),
        ("the engine stopped", None),
        ("Failed to compile json grammar", "text.format"),
        ("input_ids is empty", None),
    ],
)
def test_a_refusal_is_the_agents_only_where_it_names_what_the_agent_asked_for(
    reason: str, param: str | None
) -> None:
    refusal = refused_by_engine({"stop": "stop_sequences", "json_schema": "text.format"}, reason)
    assert (refusal and refusal.param) == param


def test_every_turn_has_a_seed_of_its_own() -> None:
    assert turn_seed(None, 0, None) is None
    assert turn_seed(None, 5, 42) == 42
    seeds = [turn_seed(session, turn, agent) for session in (1, 2) for turn in (0, 1) for agent in (None, 42)]
    assert len(set(seeds)) == 8
    assert seeds == [turn_seed(s, t, a) for s in (1, 2) for t in (0, 1) for a in (None, 42)]
    assert all(one is not None and 0 <= one < 2**31 for one in seeds)


def test_stop_and_seed_reach_the_engine() -> None:
    params = SamplingRules([2]).params(RequestedSampling(stop=["x"]), Sampling(), "", "train", 7, 0)
    assert params["stop"] == ["x"]
    assert params["sampling_seed"] == turn_seed(7, 0, None)


def test_the_budget_is_the_smallest_of_what_bounds_it() -> None:
    sampling = Sampling(max_tokens=100)
    assert token_budget(10, None, sampling, None) == 100
    assert token_budget(10, 50, sampling, 1000) == 50
    assert token_budget(10, 500, sampling, 1000) == 100
    assert token_budget(950, 500, sampling, 1000) == 50
    assert token_budget(999, None, sampling, 1000) == 1
    with pytest.raises(ApiError, match="maximum context length is 1000") as raised:
        token_budget(1000, None, sampling, 1000)
    assert raised.value.code == "context_length_exceeded"
