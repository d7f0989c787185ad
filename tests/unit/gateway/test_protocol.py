"""Strict parsing of the engine's replies: missing values are errors and are not filled in."""

from __future__ import annotations

import base64
import math
from typing import Any

import numpy as np
import orjson
import pytest

from tidegate.errors import EngineError
from tidegate.gateway.engines.protocol import (
    GenerateRequest,
    GenerateResult,
    read_reply,
    read_version,
    reply_reader,
    request_body,
)
from tidegate.turn import VersionSpan
from tidegate.types import LISTED as PAIR


def payload(ids: list[int], **meta: Any) -> dict[str, Any]:
    told = {
        "finish_reason": {"type": "stop"},
        "cached_tokens": 2,
        "output_token_logprobs": [[-0.5, one, None] for one in ids],
        "weight_versions": [{"version": "3", "start": 0, "end": len(ids)}],
    }
    return {"output_ids": ids, "meta_info": {**told, **meta}}


def test_a_good_reply() -> None:
    sampled = read_reply(payload([7, 8]))
    assert sampled == GenerateResult([7, 8], [-0.5, -0.5], [VersionSpan(3, 0, 2)], "stop", 2)


@pytest.mark.parametrize("version", ["", "v3", "-1", "3.0", " 3", "٣", None, True, 3.0, [], "default"])
def test_a_version_that_is_no_number_is_unknown(version: Any) -> None:
    assert read_version(version) is None
    sampled = read_reply(payload([7], weight_versions=[{"version": version, "start": 0, "end": 1}]))
    assert sampled.spans == []


@pytest.mark.parametrize(
    "spans",
    [
        None,
        "3",
        [None],
        [{"version": "3"}],
        [{"version": "3", "start": 0, "end": 3}],
        [{"version": "3", "start": -1, "end": 1}],
        [{"version": "3", "start": 1, "end": 1}],
        [{"version": "3", "start": 0.0, "end": 1.0}],
    ],
)
def test_malformed_spans_are_no_spans(spans: Any) -> None:
    assert read_reply(payload([7, 8], weight_versions=spans)).spans == []


def test_the_newest_version_does_not_stand_for_all_tokens() -> None:
    sampled = read_reply(payload([7], weight_versions=None, weight_version="3"))
    assert sampled.spans == []


@pytest.mark.parametrize(
    "pairs",
    [
        None,
        [],
        [[-0.5, 7, None]],
        [[-0.5, 7, None], [None, 8, None]],
        [[-0.5, 7, None], [math.nan, 8, None]],
        [[-0.5, 7, None], [-math.inf, 8, None]],
        [[-0.5, 7, None], ["x", 8, None]],
        [[-0.5, 7, None], [-0.5, 9, None]],
        [[-0.5, 7, None], []],
        "none",
    ],
)
def test_a_token_without_its_logprob_is_an_error(pairs: Any) -> None:
    with pytest.raises(EngineError, match=r"returned (no )?logprobs") as raised:
        read_reply(payload([7, 8], output_token_logprobs=pairs))
    assert not raised.value.retryable


@pytest.mark.parametrize(
    "wire",
    [
        None,
        {},
        {"output_ids": [1]},
        {"output_ids": None, "meta_info": {}},
        {"output_ids": ["1"], "meta_info": {"finish_reason": {"type": "stop"}}},
        payload([7], finish_reason=None),
        payload([7], finish_reason="stop"),
        payload([7], finish_reason={"type": "unheard of"}),
        payload([7], finish_reason={"type": "abort", "status_code": 400, "message": "too long"}),
    ],
)
def test_nonsense_is_an_error_that_is_not_retried(wire: Any) -> None:
    with pytest.raises(EngineError) as raised:
        read_reply(wire)
    assert not raised.value.retryable


def test_events_of_a_stream_may_lack_logprobs_until_the_last() -> None:
    early = read_reply(payload([7], finish_reason=None, output_token_logprobs=None), partial=True)
    assert (early.ids, early.logprobs, early.finish) == ([7], [], "")
    with pytest.raises(EngineError, match="no logprobs"):
        read_reply(payload([7], output_token_logprobs=None), partial=True)


def test_pieces_of_one_reply_join_exactly() -> None:
    sampled = GenerateResult()
    sampled.extend(GenerateResult([1, 2], [-1.0, -2.0], [VersionSpan(3, 0, 2)], "abort", 5))
    sampled.extend(GenerateResult([3], [-3.0], [VersionSpan(3, 0, 1)], "abort", 9))
    sampled.extend(GenerateResult([4], [-4.0], [VersionSpan(4, 0, 1)], "stop", 9))
    assert sampled == GenerateResult(
        [1, 2, 3, 4], [-1.0, -2.0, -3.0, -4.0], [VersionSpan(3, 0, 3), VersionSpan(4, 3, 4)], "stop", 5
    )


def test_a_call_shares_keys_and_values_with_calls_of_the_same_version_only() -> None:
    order = GenerateRequest(np.array([1], dtype=np.int32), {}, 10)
    assert orjson.loads(request_body(order, GenerateResult(), "r", 3))["cache_salt"] == "3"
    assert "cache_salt" not in orjson.loads(request_body(order, GenerateResult(), "r"))


@pytest.mark.parametrize(
    ("oldest", "told", "kv_version"),
    [(3, {}, None), (4, {}, None), (2, {}, 2), (2, {"kv_version": "1"}, 1), (None, {}, None)],
)
def test_tokens_later_than_the_kept_keys_and_values_have_their_version(
    oldest: int | None, told: dict[str, str], kv_version: int | None
) -> None:
    """The engine's own report counts more. Without a known version the tokens have none."""
    sampled = read_reply(payload([7, 8], **told))
    sampled.note_kept_kv(oldest)
    assert sampled.kv_version == kv_version
    assert sampled.spans == ([] if oldest is None else [VersionSpan(3, 0, 2)])


LISTED = [[[-0.5, 7, None], [-1.5, 3, None]], [[-0.1, 4, None], [-0.4, 9, None]]]
"""Likeliest ids of two tokens: the first is among them, the second is less likely than both."""


def packed_lists(rows: list[list[list[Any]]]) -> str:
    pairs = [(logprob, token) for row in rows for logprob, token, _ in row]
    return base64.b64encode(np.array(pairs, PAIR).tobytes()).decode()


def test_likeliest_ids_are_asked_for_and_read_in_sglangs_shape() -> None:
    order = GenerateRequest(np.array([1], dtype=np.int32), {}, 10, top_logprobs=2)
    assert orjson.loads(request_body(order, GenerateResult(), "r"))["top_logprobs_num"] == 2
    order.top_logprobs = 0
    assert "top_logprobs_num" not in orjson.loads(request_body(order, GenerateResult(), "r"))
    told = payload([7, 8], output_top_logprobs=LISTED)
    sampled = read_reply(told, top_logprobs=2)
    assert [(ids.tolist(), values.tolist()) for ids, values in sampled.top] == [
        ([7, 3], [-0.5, -1.5]), ([4, 9], pytest.approx([-0.1, -0.4])),
    ]  # fmt: skip
    assert read_reply(told).top == [], "not asked for"
    packed = read_reply(payload([7, 8], output_top_logprobs=packed_lists(LISTED)), top_logprobs=2)
    assert repr(packed.top) == repr(sampled.top)
    assert [ids.tolist() for ids, _ in read_reply(told, top_logprobs=1).top] == [[7], [4]]
    assert [len(ids) for ids, _ in read_reply(told, top_logprobs=9).top] == [2, 2], "a small vocabulary"
    joined = GenerateResult()
    joined.extend(sampled)
    joined.extend(read_reply(payload([7], output_top_logprobs=LISTED[:1]), top_logprobs=2))
    joined.truncate(2)
    assert len(joined.top) == len(joined.ids) == 2


def packed(experts: Any) -> str:
    return base64.b64encode(np.array(experts, "<i4").tobytes()).decode()


def test_experts_are_asked_for_and_joined_over_the_calls_of_a_reply() -> None:
    """An aborted call may report none: the next one reports those of its tokens, too."""
    order = GenerateRequest(np.arange(5, dtype=np.int32), {}, 10, experts_start=3)
    reply = GenerateResult()

    def call(ids: list[int], start: int, experts: Any, finish: str) -> None:
        body = orjson.loads(request_body(order, reply, "r"))
        assert (body["return_routed_experts"], body["routed_experts_start_len"]) == (True, start)
        told = payload(
            ids, finish_reason={"type": finish}, output_token_logprobs=[[-1.0, one] for one in ids]
        )
        if experts is not None:
            told["meta_info"]["routed_experts"] = packed(experts)
        reply.extend(reply_reader(order, reply)(told))

    call([7, 8], 3, [[3, 30], [4, 40], [5, 50]], "abort")
    assert order.has_experts(reply)
    call([9], 6, None, "abort")
    assert not order.has_experts(reply)
    call([1, 2], 6, [[6, 60], [7, 70], [8, 80]], "stop")
    assert order.has_experts(reply)
    assert reply.experts is not None
    assert reply.experts.tolist() == [[at, 10 * at] for at in range(3, 9)]
    order.experts_start = None
    assert "return_routed_experts" not in orjson.loads(request_body(order, GenerateResult(), "r"))


@pytest.mark.parametrize(
    "experts",
    [None, "", packed([1, 2, 3]), packed([[1], [-1]]), packed([[1], [2**16]]), "ä", "AAAA", 7],
    ids=[
        "missing",
        "empty",
        "of another number of tokens",
        "padding",
        "too large",
        "no text",
        "torn",
        "a number",
    ],
)
def test_wrong_experts_are_an_error_that_names_the_option(experts: Any) -> None:
    with pytest.raises(EngineError, match=r"not the experts of 2 tokens: .*--enable-return-routed-experts"):
        read_reply(payload([7], routed_experts=experts), routed=1)


def test_likeliest_ids_of_a_stream_come_last() -> None:
    order = GenerateRequest(np.array([1], dtype=np.int32), {}, 10, top_logprobs=2)
    early = read_reply(payload([7], finish_reason=None), partial=True, top_logprobs=2)
    assert early.top == []
    assert not order.has_logprobs(early), "an interrupted reply cannot go on from it"
    last = read_reply(payload([7], output_top_logprobs=LISTED[:1]), partial=True, top_logprobs=2)
    assert order.has_logprobs(last)
    aborted = payload([], finish_reason={"type": "abort"})
    assert read_reply(aborted, top_logprobs=2).top == []


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (
            None,
            "no likeliest ids .*score_centering needs an engine that honours top_logprobs_num",
        ),
        ([], "no likeliest ids"),
        (LISTED[:1], "no likeliest ids"),
        ([LISTED[0], None], "no likeliest ids"),
        ([LISTED[0], []], "no likeliest ids"),
        ("", "no likeliest ids"),
        ("not base64", "no likeliest ids"),
        (packed_lists(LISTED)[:-12], "no likeliest ids"),
        (packed_lists([LISTED[0], LISTED[1][::-1]]), "malformed output_top_logprobs"),
        ([LISTED[0], LISTED[1][:1]], "malformed output_top_logprobs"),
        ([LISTED[0], [[-0.4, 9, None], [-0.1, 4, None]]], "malformed output_top_logprobs"),
        ([LISTED[0], [[None, 9, None], [-0.1, 4, None]]], "malformed output_top_logprobs"),
        ([LISTED[0], [["x", 9, None], [-0.1, 4, None]]], "malformed output_top_logprobs"),
        ([LISTED[0], [[-0.1, 2**40, None], [-0.2, 4, None]]], "malformed output_top_logprobs"),
        ([LISTED[0], [[-0.1, 8, None], [-0.4, 9, None]]], "another distribution .* sampled id 8 .* by 0.4;"),
        ([LISTED[0], [[-0.7, 4, None], [-0.9, 9, None]]], "another distribution .* sampled id 8 .* by 0.4;"),
    ],
)
def test_likeliest_ids_that_are_missing_or_of_another_distribution_are_refused(rows: Any, words: str) -> None:
    with pytest.raises(EngineError, match=words) as raised:
        read_reply(payload([7, 8], output_top_logprobs=rows), top_logprobs=2)
    assert not raised.value.retryable


KEPT: dict[str, Any] = {
    "output_token_sampling_mask": [[7, 3], [8, 4, 9]],
    "output_token_sampling_logprobs": [-0.25, -0.125],
}
"""Kept ids of the two tokens of LISTED, each with a logprob of -0.5 among all ids."""


def narrowed_reply(**changed: Any) -> dict[str, Any]:
    return payload([7, 8], **{**KEPT, **changed})


def test_kept_ids_are_asked_for_and_logprobs_are_those_among_them() -> None:
    order = GenerateRequest(np.array([1], dtype=np.int32), {}, 10, sampling_mask=True)
    assert orjson.loads(request_body(order, GenerateResult(), "r"))["return_sampling_mask"] is True
    order.sampling_mask = False
    assert "return_sampling_mask" not in orjson.loads(request_body(order, GenerateResult(), "r"))
    whole = read_reply(narrowed_reply())
    assert (whole.kept, whole.logprobs) == ([], [-0.5, -0.5]), "not asked for"
    order.sampling_mask = True
    assert not order.has_logprobs(whole), "an interrupted reply cannot go on from it"
    listed = [[[-0.5, 7, None], [-1.5, 2, None]], [[-0.5, 8, None], [-1.0, 9, None]]]
    sampled = read_reply(narrowed_reply(output_top_logprobs=listed), top_logprobs=2, sampling_mask=True)
    assert order.has_logprobs(sampled)
    assert [ids.tolist() for ids in sampled.kept] == [[7, 3], [8, 4, 9]]
    assert sampled.logprobs == [-0.25, -0.125]
    assert [(ids.tolist(), values.tolist()) for ids, values in sampled.top] == [
        ([7, 2], [-0.25, -9999.0]), ([8, 9], [-0.125, -0.625]),
    ]  # fmt: skip
    joined = GenerateResult()
    joined.extend(sampled)
    joined.extend(sampled)
    joined.truncate(3)
    assert len(joined.kept) == len(joined.ids) == 3
    aborted = payload([], finish_reason={"type": "abort"})
    assert read_reply(aborted, sampling_mask=True).kept == []


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"output_token_sampling_mask": None}, "no kept ids for some of 2 .*honours return_sampling_mask"),
        ({"output_token_sampling_logprobs": [-0.25]}, "no kept ids"),
        ({"output_token_sampling_mask": [[7], None]}, "malformed kept ids"),
        ({"output_token_sampling_mask": [[7], [2**40]]}, "malformed kept ids"),
        ({"output_token_sampling_logprobs": [-0.25, "x"]}, "malformed kept ids"),
        ({"output_token_sampling_mask": [[7], [4]]}, "id 8 is not among 1 kept ids"),
        ({"output_token_sampling_mask": [[7], []]}, "id 8 is not among 0 kept ids"),
        ({"output_token_sampling_logprobs": [-0.25, 0.5]}, "its logprob is 0.5 among them"),
        (
            {"output_token_sampling_logprobs": [-0.25, -2.5]},
            "its logprob is -2.5 among them and -0.5 among all",
        ),
        ({"output_token_sampling_logprobs": [-0.25, None]}, "its logprob is nan among them"),
    ],
)
def test_kept_ids_that_are_missing_or_contradict_the_sample_are_refused(
    changed: dict[str, Any], words: str
) -> None:
    with pytest.raises(EngineError, match=words) as raised:
        read_reply(narrowed_reply(**changed), sampling_mask=True)
    assert not raised.value.retryable


def test_a_piece_of_unknown_version_leaves_a_gap() -> None:
    sampled = GenerateResult()
    sampled.extend(GenerateResult([1], [-1.0], [VersionSpan(3, 0, 1)], ""))
    sampled.extend(GenerateResult([2], [-1.0], [], ""))
    sampled.extend(GenerateResult([3], [-1.0], [VersionSpan(3, 0, 1)], "stop"))
    assert sampled.spans == [VersionSpan(3, 0, 1), VersionSpan(3, 2, 3)]


def test_a_call_continues_after_what_was_sampled() -> None:
    order = GenerateRequest(np.array([1, 2], dtype=np.int32), {"temperature": 1.0}, 10)
    body = orjson.loads(request_body(order, GenerateResult([3, 4], [-1.0, -1.0]), "r"))
    assert body["input_ids"] == [1, 2, 3, 4]
    assert body["sampling_params"] == {"temperature": 1.0, "max_new_tokens": 8}
    assert body["return_logprob"] is True
    assert "logprob_start_len" not in body


def test_the_age_of_kept_keys_and_values() -> None:
    assert read_reply(payload([7])).kv_version is None
    assert read_reply(payload([7], kv_version="2")).kv_version == 2
    unknown = read_reply(payload([7], kv_version="latest"))
    assert (unknown.kv_version, unknown.spans) == (None, [])
    sampled = GenerateResult()
    for version in (None, 3, 2, None, 4):
        sampled.extend(GenerateResult([1], [-1.0], [], "abort", 0, version))
    assert sampled.kv_version == 2
