"""A tokenizer of realistic size: Mistral's tekken with 130,000 tokens, from `mistral-common`."""

from __future__ import annotations

import base64
import importlib.util
import itertools
import json
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers


@cache
def tekken() -> str:
    """The tokenizer as `tokenizers`' JSON, without special tokens; built once per process (about 2 s)."""
    spec = importlib.util.find_spec("mistral_common")
    assert spec is not None, "pip install mistral-common"
    assert spec.submodule_search_locations
    data = json.loads((Path(spec.submodule_search_locations[0]) / "data" / "tekken_240911.json").read_text())
    config = data["config"]
    size = config["default_vocab_size"] - config["default_num_special_tokens"]
    tokens = [base64.b64decode(entry["token_bytes"]) for entry in data["vocab"][:size]]
    letters = _letters()
    spelt = ["".join(letters[byte] for byte in token) for token in tokens]
    rank = {token: index for index, token in enumerate(tokens)}
    merges = []
    for token in tokens:
        if len(token) > 1:
            left, right = _halves(token, rank)
            merges.append((spelt[rank[left]], spelt[rank[right]]))
    vocabulary = {text: index for index, text in enumerate(spelt)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(config["pattern"]), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return str(tokenizer.to_str())


def _halves(token: bytes, rank: dict[bytes, int]) -> tuple[bytes, bytes]:
    """The two tokens of lower rank whose merge yields `token`."""
    parts = [token[at : at + 1] for at in range(len(token))]
    while len(parts) > 2:
        ranks: list[Any] = [rank.get(a + b, len(rank)) for a, b in itertools.pairwise(parts)]
        at = ranks.index(min(ranks))
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts[0], parts[1]


def _letters() -> dict[int, str]:
    """The printable character that stands for each byte in byte-level tokenizers."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) for byte in plain} | {byte: chr(256 + n) for n, byte in enumerate(others)}
