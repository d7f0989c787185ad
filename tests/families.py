"""Model families: their control tokens, and test templates in their output formats."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast

from tests.real_tokenizer import tekken
from tests.tiny_tokenizer import tiny_backend
from tidegate.gateway.rendering.renderer import Renderer

TEMPLATES = Path(__file__).parent / "templates"


@dataclass(frozen=True)
class Family:
    """Tokens and template properties of a model family.

    `special`: control tokens. `plain`: added tokens that are ordinary text. `stops`: tokens that end a reply.
    `calls`: maximum number of parallel calls in the template. `strict`: user and assistant must alternate,
    and a system message may only come first. `marks`: the token of the next role, where that token ends a
    reply. `thinks`: the template removes past thoughts. `ends`: the model's end token and the template's end
    token of a past reply, where they differ. `swallows`: the tokens absorb the whitespace after them.
    `moves`: the template rewrites some earlier text at each question.
    """

    name: str
    special: tuple[str, ...]
    stops: tuple[str, ...]
    plain: tuple[str, ...] = ()
    calls: int = 2
    strict: bool = False
    marks: dict[str, str] = field(default_factory=dict)
    thinks: bool = False
    ends: tuple[str, str] | None = None
    swallows: bool = False
    moves: bool = False

    @property
    def template(self) -> str:
        return (TEMPLATES / f"{self.name}.jinja").read_text(encoding="utf-8")


_IM = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
_HERMES = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
_DEEPSEEK = (
    "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>",
    "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>", "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>", "<｜tool▁output▁begin｜>",
    "<｜tool▁output▁end｜>",
)  # fmt: skip
_MISTRAL = (
    "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]",
    "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[ARGS]", "[TOOL_CONTENT]",
)  # fmt: skip
_COHERE = (
    "<BOS_TOKEN>", "<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|SYSTEM_TOKEN|>", "<|USER_TOKEN|>",
    "<|CHATBOT_TOKEN|>", "<|START_ACTION|>", "<|END_ACTION|>", "<|START_TOOL_RESULT|>",
    "<|END_TOOL_RESULT|>", "<|START_THINKING|>", "<|END_THINKING|>",
)  # fmt: skip
_LLAMA = (
    "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>",
    "<|python_tag|>",
)  # fmt: skip
_GLM = ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|endoftext|>")
_KIMI = (
    "<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>", "<|im_end|>",
    "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>", "<|tool_call_end|>",
)  # fmt: skip
_HARMONY = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>", "<|constrain|>")

FAMILIES = {
    family.name: family
    for family in (
        Family("qwen25", _IM, ("<|im_end|>",), _HERMES),
        Family("qwen3", _IM, ("<|im_end|>", "<|endoftext|>"), _HERMES, thinks=True),
        Family("llama3", _LLAMA, ("<|eot_id|>", "<|eom_id|>"), calls=1),
        Family("mistral_v3", _MISTRAL, ("</s>",), strict=True, moves=True),
        Family("mistral_v7", _MISTRAL, ("</s>",)),
        Family("gemma", ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"), ("<end_of_turn>", "<eos>"),
               calls=0, strict=True),
        Family("phi3", ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|endoftext|>", "<|tool|>"),
               ("<|end|>", "<|endoftext|>"), calls=0, swallows=True),
        Family("phi4", (*_IM, "<|im_sep|>"), ("<|im_end|>",), calls=0),
        Family("deepseek_v3", _DEEPSEEK, ("<｜end▁of▁sentence｜>",), strict=True),
        Family("deepseek_r1", _DEEPSEEK, ("<｜end▁of▁sentence｜>",), ("<think>", "</think>"), strict=True,
               thinks=True),
        Family("glm4", _GLM, ("<|endoftext|>", "<|user|>", "<|observation|>"),
               (*_HERMES, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
               marks={"user": "<|user|>", "tool": "<|observation|>"}),
        Family("granite", ("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>", "<|tool_call|>"),
               ("<|end_of_text|>",)),
        Family("command_r", _COHERE, ("<|END_OF_TURN_TOKEN|>",)),
        Family("gpt_oss", _HARMONY, ("<|return|>", "<|call|>"), calls=1, ends=("<|return|>", "<|end|>")),
        Family("kimi_k2", _KIMI, ("<|im_end|>",)),
        Family("qwen3_coder", _IM, ("<|im_end|>",), _HERMES),
        Family("smollm", _IM, ("<|im_end|>",), calls=0),
    )
}  # fmt: skip


@cache
def _tokenizer(size: str, swallows: bool) -> Any:
    """One vocabulary with the tokens of all families that do (or do not) swallow whitespace."""
    members = [family for family in FAMILIES.values() if family.swallows == swallows]
    special = dict.fromkeys(token for family in members for token in family.special)
    plain = dict.fromkeys(token for family in members for token in family.plain)
    backend = Tokenizer.from_str(tekken() if size == "real" else tiny_backend())
    backend.add_special_tokens([AddedToken(one, special=True, rstrip=swallows) for one in special])
    backend.add_tokens([AddedToken(one, special=False, normalized=False) for one in plain])
    return PreTrainedTokenizerFast(tokenizer_object=backend)


@cache
def family_tokenizer(name: str, size: str) -> Any:
    """A family's tokenizer on the `tiny` vocabulary or the `real` one."""
    family = FAMILIES[name]
    tokenizer = copy.copy(_tokenizer(size, family.swallows))
    tokenizer._special_tokens_map = dict(tokenizer._special_tokens_map)
    tokenizer.eos_token = family.stops[0]
    tokenizer.chat_template = family.template
    return tokenizer


@cache
def family_renderer(name: str, size: str) -> Renderer:
    tokenizer = family_tokenizer(name, size)
    return Renderer(tokenizer, [tokenizer.convert_tokens_to_ids(stop) for stop in FAMILIES[name].stops])
