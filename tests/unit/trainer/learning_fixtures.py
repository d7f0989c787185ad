"""Fixtures for tests of training: a tiny random model, rows, and random trees of turns.

Functions import torch where they need it, because most of these tests do not.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from tidegate.trainer.batch.rows import TrainingSequence
from tidegate.turn import Turn, VersionSpan
from tidegate.types import Outcome, Trajectory

if TYPE_CHECKING:
    from tidegate.trainer.batch.microbatch import Microbatch

VOCABULARY = 48


def make_model(path: Path, seed: int = 0, family: str = "qwen3") -> Path:
    """A random model of the family with a tokenizer and a chat template, in Hugging Face format."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    from tests.tiny import make_tiny_model

    make_tiny_model(path, VOCABULARY, hidden=32, family=family, seed=seed)
    words = {f"w{number}": number for number in range(VOCABULARY)}
    words_tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    words_tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words_tokenizer)
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    tokenizer.save_pretrained(path)
    return path


def make_row(
    rng: np.random.Generator, *, shortest: int = 4, longest: int = 40, group: str = "g"
) -> TrainingSequence:
    """A row with several trained stretches, versions 2 to 4, and temperatures that differ by token."""
    length = int(rng.integers(shortest, longest + 1))
    mask = rng.random(length) < 0.5
    mask[0] = False
    mask[-1] = True
    return TrainingSequence(
        ids=rng.integers(0, VOCABULARY, length).astype(np.int32),
        mask=mask,
        logprobs=np.where(mask, -rng.exponential(3.0, length), 0).astype(np.float32),
        versions=np.where(mask, rng.integers(2, 5, length), -1),
        temperature=np.where(mask, rng.choice([0.7, 1.0, 1.3], length), 1.0).astype(np.float32),
        advantages=np.where(mask, rng.normal(), 0).astype(np.float32),
        group_id=group,
        session_id=f"{group}-{rng.integers(2**60)}",
    )


def make_rows(number: int, seed: int = 0, **shape: int) -> list[TrainingSequence]:
    rng = np.random.default_rng(seed)
    return [make_row(rng, group=f"g{index % 3}", **shape) for index in range(number)]


def make_group(
    rng: np.random.Generator,
    *,
    size: int,
    prompt: int,
    replies: tuple[int, int] = (5, 20),
    vocabulary: int = VOCABULARY,
    group: str = "g",
) -> list[TrainingSequence]:
    """Rows with a prompt in common, none of which is trained, and replies of their own."""
    beginning = rng.integers(0, vocabulary, prompt)
    rows = []
    for _ in range(size):
        reply = make_row(rng, shortest=replies[0], longest=replies[1], group=group)
        reply.mask[0] = True

        def behind(context: object, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
            return np.concatenate([np.full(prompt, context), values]).astype(values.dtype)

        rows.append(
            replace(
                reply,
                ids=np.concatenate([beginning, reply.ids % vocabulary]).astype(np.int32),
                mask=behind(False, reply.mask),
                logprobs=behind(0, reply.logprobs),
                versions=behind(-1, reply.versions),
                temperature=behind(1, reply.temperature),
                advantages=behind(0, reply.advantages),
            )
        )
    return rows


def lay(rows: list[TrainingSequence], max_tokens: int) -> list[Microbatch]:
    """As few microbatches as possible, without prefixes."""
    from tidegate.trainer.batch.packing import microbatches

    return microbatches(rows, range(len(rows)), max_tokens, overhead=1_000_000, max_padding=1.0)


def make_trajectory(turns: list[Turn]) -> Trajectory:
    return Trajectory(
        "s1", "t1", "test", "train", Outcome.COMPLETED, turns, group_id="g1", slot=0, reward=1.0
    )


def make_turn(
    index: int,
    parent: int | None,
    delta: list[int],
    output: list[int],
    *,
    version: int = 0,
    temperature: float = 1.0,
    delivered: bool = True,
    forced: tuple[int, ...] = (),
) -> Turn:
    """A turn whose token with id i was recorded with logprob −i ÷ 1000; `forced` are offsets."""
    mask = np.ones(len(output), dtype=np.uint8)
    mask[list(forced)] = 0
    return Turn(
        index=index,
        parent=parent,
        delta_ids=np.array(delta, dtype=np.int32),
        output_ids=np.array(output, dtype=np.int32),
        logprobs=np.array(output, dtype=np.float32) / -1000,
        version_spans=(VersionSpan(version, 0, len(output)),) if output else (),
        finish_reason="stop",
        temperature=temperature,
        delivered=delivered,
        output_mask=mask if forced else None,
    )


@st.composite
def trees(draw: st.DrawFn) -> Trajectory:
    """Random trees of turns in which every token has an id of its own, so that each can be traced."""
    ids = count()
    turns: list[Turn] = []
    for index in range(draw(st.integers(1, 9))):
        parent = draw(st.none() | st.integers(0, index - 1)) if index else None
        delta = draw(st.integers(1 if parent is None else 0, 4))
        output = draw(st.integers(0, 4))
        forced = draw(st.sets(st.integers(0, output - 1))) if output and draw(st.booleans()) else ()
        turns.append(
            make_turn(
                index,
                parent,
                [next(ids) for _ in range(delta)],
                [next(ids) for _ in range(output)],
                version=draw(st.integers(0, 5)),
                temperature=draw(st.sampled_from([0.5, 1.0, 2.0])),
                delivered=draw(st.integers(0, 3)) > 0,
                forced=tuple(forced),
            )
        )
    return make_trajectory(turns)
