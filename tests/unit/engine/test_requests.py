"""Each refusal of `/generate` names the invalid field."""

from __future__ import annotations

from typing import Any

import pytest

from tidegate.engine.requests.params import TokenLimits
from tidegate.engine.requests.request import parse_generate, samples_of
from tidegate.engine.validation import RequestError

LIMITS = TokenLimits(vocab_size=50, max_context=20, eos_ids=frozenset([2]), has_tokenizer=False)


def parse(sampling: dict[str, Any] | None = None, **body: Any) -> Any:
    return parse_generate({"input_ids": [1, 2, 3], "sampling_params": sampling or {}, **body}, LIMITS)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ([], "the body is not a JSON object"),
        ({}, "input_ids"),
        ({"input_ids": []}, "input_ids is empty"),
        ({"input_ids": "abc"}, "input_ids"),
        ({"input_ids": [[1], [2]]}, "input_ids"),
        ({"input_ids": [1, True]}, "input_ids"),
        ({"input_ids": [1, 50]}, "input_ids[1] = 50"),
        ({"input_ids": [1, -1]}, "input_ids[1] = -1"),
        ({"input_ids": [1] * 20}, "max_context = 20"),
        ({"input_ids": [1], "rid": ""}, "rid = ''"),
        ({"input_ids": [1], "rid": 7}, "rid = 7"),
        ({"input_ids": [1], "stream": "yes"}, "stream = 'yes'"),
        ({"input_ids": [1], "text": "hello"}, "text = 'hello'"),
        (
            {"input_ids": [1], "top_logprobs_num": 5},
            "top_logprobs_num = 5 has no effect without",
        ),
        ({"input_ids": [1], "top_logprobs_num": -1, "return_logprob": True}, "top_logprobs_num = -1"),
        ({"input_ids": [1], "colour": "red"}, "colour is not a parameter"),
        ({"input_ids": [1], "sampling_params": [1]}, "sampling_params is not"),
    ],
)
def test_bad_bodies(body: Any, words: str) -> None:
    with pytest.raises(RequestError) as refusal:
        parse_generate(body, LIMITS)
    assert words in str(refusal.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", "hot"),
        ("temperature", True),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_k", 1.5),
        ("max_new_tokens", 0),
        ("max_new_tokens", 2.0),
        ("sampling_seed", "x"),
        ("ignore_eos", 1),
        ("stop", ["\n"]),  # no tokenizer to find it with
        ("stop", [""]),
        ("stop_token_ids", 5),
        ("stop_token_ids", ["5"]),
        ("min_p", 1.5),
        ("min_p", -0.1),
        ("n", 0),
        ("n", 129),
        ("n", True),
        ("frequency_penalty", 2.5),
        ("presence_penalty", -3),
        ("repetition_penalty", 0),
        ("repetition_penalty", 2.1),
        ("json_schema", {}),
        ("regex", ""),
        ("skip_special_tokens", "no"),
        ("min_new_tokens", 5),
        ("logit_bias", {"3": 1}),
        ("structural_tag", "x"),
        ("tempreature", 1.0),
    ],
)
def test_bad_sampling_parameters(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=rf"sampling_params\.{name}"):
        parse({name: value})


def test_a_reply_follows_one_grammar_at_most() -> None:
    with pytest.raises(RequestError, match=r"sampling_params\.ebnf.*regex is given too"):
        parse({"regex": "a", "ebnf": 'root ::= "a"'})


def test_several_samples_are_requests_of_their_own() -> None:
    assert samples_of(one := parse({"sampling_seed": 5})) == [one]
    several = samples_of(parse({"n": 3, "sampling_seed": 2**64 - 1, "temperature": 0.5}, rid="a"))
    assert [each.rid for each in several] == ["a_0", "a_1", "a_2"]
    assert [each.params.seed for each in several] == [2**64 - 1, 0, 1]
    assert {(each.params.temperature, each.params.n) for each in several} == {(0.5, 1)}
    several[0].output_ids.append(1)
    assert several[1].output_ids == []


def test_every_sample_reports_the_likeliest_ids_of_the_prompt_if_they_are_requested() -> None:
    asked = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2}
    several = samples_of(parse({"n": 2, "max_new_tokens": 0}, **asked))
    assert [(each.logprob_start, each.top_logprobs) for each in several] == [(0, 2), (0, 2)]


def test_kept_ids_are_given_where_ids_are_excluded() -> None:
    several = samples_of(parse({"n": 2, "top_p": 0.5}, return_sampling_mask=True))
    assert [each.sampling_mask for each in several] == [True, True]
    unnarrowed = ({}, {"top_p": 0.5, "temperature": 0}, {"top_k": 4, "temperature": 1e-7})
    for params in (*unnarrowed, {"top_p": 1 - 1e-9}, {"min_p": 1e-50}):  # as the sampler reads them
        with pytest.raises(
            RequestError, match="return_sampling_mask = true needs sampling_params that exclude ids"
        ):
            parse(params, return_sampling_mask=True)


def test_parameters_at_their_neutral_values_are_taken() -> None:
    neutral = {"n": 1, "min_p": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "stop": None}
    neutral |= {"min_new_tokens": 0, "json_schema": None, "skip_special_tokens": None}
    assert parse(neutral).params.skip_special_tokens
    assert parse(neutral, logprob_start_len=-1, text=None).error is None


def test_defaults() -> None:
    one = parse()
    assert (one.params.temperature, one.params.top_p, one.params.top_k) == (1.0, 1.0, -1)
    assert one.params.stop_ids == {2}
    assert one.limit == 17  # 128, but the context leaves 17
    assert len(one.rid) == 32
    assert parse().params.seed != parse().params.seed


def test_stop_ids_join_the_models_own_and_ignore_eos_drops_both() -> None:
    assert parse({"stop_token_ids": [7]}).params.stop_ids == {2, 7}
    assert parse({"stop_token_ids": [7], "ignore_eos": True}).params.stop_ids == frozenset()


def test_any_integer_is_a_seed() -> None:
    assert parse({"sampling_seed": -1}).params.seed == 2**64 - 1
    assert parse({"sampling_seed": 2**64 + 3}).params.seed == 3


def test_a_reply_lists_at_most_the_vocabulary() -> None:
    asked = {"input_ids": [1], "return_logprob": True}
    assert parse_generate({**asked, "top_logprobs_num": 5}, LIMITS).top_logprobs == 5
    assert parse_generate({**asked, "top_logprobs_num": 10**6}, LIMITS).top_logprobs == LIMITS.vocab_size
