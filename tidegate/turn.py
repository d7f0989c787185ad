"""A turn: one sampled reply, with its tokens, their logprobs and the policy versions that sampled them.

Arrays sent between processes have fixed types: token ids are int32, logprobs float32, those of likeliest ids
float16, experts uint16.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int32]
Logprobs = npt.NDArray[np.float32]
PackedIds = npt.NDArray[np.int32]
"""Ids that JSON has as text: the compressed bytes of the array in base64."""
PackedLogprobs = npt.NDArray[np.float16]
"""Logprobs of many ids, in half precision: a probability is off by at most 2e-4, a ratio by 0.4%."""
PackedExperts = npt.NDArray[np.uint16]
"""Ids of the experts that compute tokens, packed as `PackedIds`."""
CLIENT_CLOSED = "client_closed"
"""Finish reason of a turn whose client closed the stream. The turn has the tokens delivered until then."""


class VersionSpan(NamedTuple):
    """Policy version `version` sampled the output tokens `start..end` (end exclusive)."""

    version: int
    start: int
    end: int


@dataclass(slots=True)
class Turn:
    """One sampled reply.

    A turn stores only the ids that its prompt adds to its parent, so a session takes memory in proportion to
    its distinct tokens, and a follow-up extends the recorded ids by construction.
    """

    index: int
    """Position in the trajectory's `turns`."""
    parent: int | None
    """Index of the turn whose sequence the prompt extends; None for a root."""
    delta_ids: Ids
    """Ids that the prompt adds to the parent's prompt + output; the whole prompt of a root; shape [delta]."""
    output_ids: Ids
    """Sampled ids; shape [output]."""
    logprobs: Logprobs
    """Log-probability of each sampled id, as reported by the engine: among the kept ids if these are
    recorded; shape [output]."""
    version_spans: tuple[VersionSpan, ...]
    """Policy versions of the output tokens, as reported by the engine."""
    finish_reason: str
    """`stop`, `length`, or CLIENT_CLOSED."""
    temperature: float
    """Temperature of the sampling."""
    _: KW_ONLY
    delivered: bool = True
    """Whether the reply reached the agent."""
    kv_version: int | None = None
    """Oldest policy version among the keys and values kept across a publish; None if there are none."""
    cached_tokens: int = 0
    """Prompt tokens whose keys and values the engine reused."""
    output_mask: npt.NDArray[np.uint8] | None = None
    """1 for each output token that may be trained on, 0 if a grammar changed its distribution; None: all may
    be."""
    branch: str | None = None
    """Why the turn does not extend the newest one; None if it does."""
    started: float = 0.0
    """Unix time of the request."""
    seconds: float = 0.0
    """Duration from the request to the last token."""
    parse: str | None = None
    """Result of reading its tool calls: `ok`, `malformed` (part of them stayed content), None: no calls."""
    reward: float = 0.0
    """Reward of this turn, in addition to the episode's."""
    exempt: str | None = None
    """Why the delivered turn is not trained on (the request's header, model name or key), or None."""
    structured: str | None = None
    """How a reply to a request with a JSON schema was sampled: under the `grammar`, or as free `text`."""
    teacher_logprobs: Logprobs | None = None
    """Log-probability of each sampled id under the teacher, added by the trainer; None without a teacher;
    shape [output]."""
    teacher_top_ids: Ids | None = None
    """The teacher's k likeliest ids in place of each sampled one, added by the trainer; None unless
    `trainer.teacher.form` is `distribution`; shape [output · k], token after token."""
    teacher_top_logprobs: Logprobs | None = None
    """Log-probability of these ids under the teacher; shape [output · k]."""
    top_ids: PackedIds | None = None
    """The k likeliest ids of the engine in place of each sampled one, likeliest first; None unless
    `trainer.loss.score_centering` requests them; shape [output · k], token after token."""
    top_logprobs: PackedLogprobs | None = None
    """Log-probability of these ids, of the distribution that was sampled; shape [output · k]."""
    kept_ids: PackedIds | None = None
    """The ids that top-p, top-k and min-p kept in place of each sampled one, token after token; None unless
    they applied in training."""
    kept_counts: PackedIds | None = None
    """Numbers of these ids for each token; shape [output]."""
    experts: PackedExperts | None = None
    """The experts with which the engine computed the token before each of the turn's own, of `delta_ids` and
    `output_ids`, as the model reads that token to predict its own; None unless `trainer.routing_replay`
    requests them. The first token of a root has none before it. Shape [tokens · layers · k], token after
    token."""
    policy: str = ""
    """Name of the policy that sampled it; empty in a run with one policy."""

    @property
    def routed_tokens(self) -> int:
        """Number of tokens whose experts are recorded with the turn, if they are recorded."""
        return len(self.delta_ids) + len(self.output_ids) - (self.parent is None)

    @property
    def top_k(self) -> int:
        """Number of the engine's likeliest ids for each sampled one, 0 without them."""
        return 0 if self.top_ids is None else len(self.top_ids) // max(1, len(self.output_ids))

    @property
    def teacher_top_k(self) -> int:
        """Number of likeliest ids for each sampled one, 0 without them."""
        return 0 if self.teacher_top_ids is None else len(self.teacher_top_ids) // len(self.output_ids)

    @property
    def trainable(self) -> bool:
        """Whether its tokens may be trained on: it was delivered, and no rule exempts it."""
        return self.delivered and self.exempt is None

    def oldest_version(self) -> int | None:
        """Returns the smallest version of its sampled tokens and their KV cache, None if any is unknown."""
        if not covers(self.version_spans, len(self.output_ids)):
            return None
        versions = [span.version for span in self.version_spans]
        if self.kv_version is not None:
            versions.append(self.kv_version)
        return min(versions, default=None)

    def token_versions(self) -> npt.NDArray[np.int64]:
        """Returns the version of each output token, −1 if the engine reported none; shape [output]."""
        versions = np.full(len(self.output_ids), -1, dtype=np.int64)
        for version, start, end in self.version_spans:
            versions[start:end] = version
        return versions


def covers(spans: Sequence[VersionSpan], length: int) -> bool:
    """Returns whether the spans cover tokens `0..length` without gaps, each with an integer version ≥ 0."""
    at = 0
    for version, start, end in spans:
        if type(version) is not int or version < 0 or start != at or end <= start:
            return False
        at = end
    return at == length


def spans_within(spans: Sequence[VersionSpan], first: int, end: int) -> list[VersionSpan]:
    """Returns the spans within the tokens `first..end`, counted from `first`."""
    return [
        VersionSpan(version, max(start, first) - first, min(stop, end) - first)
        for version, start, stop in spans
        if start < end and stop > first
    ]
