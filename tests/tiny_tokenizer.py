"""A tiny byte-level BPE and chat templates of several families, made at test time."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "[INST]", "[/INST]", "</s>", "[TOOL_RESULTS]"]
PLAIN = ["<tool_call>", "</tool_call>", "<think>", "</think>"]

QWEN2 = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "# Tools\\n\\n<tools>" }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\\n</tools>\\n\\nFor each call return <tool_call>\\n{\\"name\\": ...}\\n</tool_call><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" %}
        {%- set ns.multi_step_tool = false %}{%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning = '' %}
        {%- if '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if THINKS and loop.index0 > ns.last_query_index and (loop.last or reasoning) %}
            {{- '<|im_start|>assistant\\n<think>\\n' + reasoning + '\\n</think>\\n\\n' + content }}
        {%- else %}
            {{- '<|im_start|>assistant\\n' + content }}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {%- if (loop.first and content) or not loop.first %}{{- '\\n' }}{%- endif %}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments if call.function.arguments is string else
                call.function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or messages[loop.index0 - 1].role != "tool" %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != "tool" %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
""".replace("THINKS", "false")
QWEN3 = QWEN2.replace("{%- if false and loop.index0", "{%- if loop.index0")

MISTRAL = """\
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content + '\\n\\n' %}{%- set messages = messages[1:] %}
{%- else %}{%- set system = '' %}{%- endif %}
{%- set ns = namespace(open=0) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '[INST]' + (system if loop.first else '') + message.content + '[/INST]' }}
    {%- elif message.role == 'assistant' and message.tool_calls %}
        {%- set ns.open = message.tool_calls | length %}
        {{- message.tool_calls | map(attribute='function') | list | tojson + '</s>' }}
    {%- elif message.role == 'assistant' %}
        {{- ' ' + message.content + '</s>' }}
    {%- elif message.role == 'tool' %}
        {%- if ns.open == 0 %}{{- raise_exception('a tool result without a call') }}{%- endif %}
        {%- set ns.open = ns.open - 1 %}
        {{- '[TOOL_RESULTS]' + message.content + '[/INST]' }}
    {%- else %}{{- raise_exception('no such role') }}{%- endif %}
{%- endfor %}
"""

# The text after a reply depends on the number of messages before it.
COUNTING = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + ' ' + loop.index|string + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant ' + (messages|length + 1)|string + '\\n' }}
{%- endif %}
"""

# The template changes the text of a reply, so that no continuation can be rendered after it.
SHOUTING = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content|upper|replace('-', '_') + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

# Writes the name of the message's author, drops text beside calls, and reads the reasoning effort.
NAMED = """\
{%- for message in messages %}
    {{- '<|im_start|>' + (message.name or message.role) + '\\n' }}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>\\n' + call.function | tojson + '\\n</tool_call>' }}
    {%- else %}{{- message.content }}{%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- ('Effort: ' + reasoning_effort + '\\n' if reasoning_effort else '') + '<|im_start|>assistant\\n' }}
{%- endif %}
"""

TEMPLATES = {
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "mistral": MISTRAL,
    "counting": COUNTING,
    "shouting": SHOUTING,
    "named": NAMED,
}
_CORPUS = [
    "What is 12 + 30 * 7? The answer is #### 42.",
    '{"name": "calculator", "arguments": {"expression": "1 + 2"}}',
    "system user assistant tool response the of and to in is that it",
    "Tom has three apples and buys five more. How many apples does he have now?",
] * 3


@cache
def tiny_backend() -> str:
    """The tokenizer as `tokenizers`' JSON, with the special tokens of TEMPLATES."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in PLAIN])
    return str(tokenizer.to_str())


def make_tokenizer(template: str = "qwen2") -> Any:
    """A tokenizer whose chat template is one of TEMPLATES."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(tiny_backend()),
        eos_token="</s>" if template == "mistral" else "<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=SPECIAL[1:],
    )
    tokenizer.chat_template = TEMPLATES[template]
    return tokenizer


def make_model_dir(directory: Path, template: str = "qwen2") -> Path:
    """Makes the part of a model directory that a gateway reads: tokenizer, template, context length."""
    make_tokenizer(template).save_pretrained(str(directory))
    (directory / "config.json").write_text(json.dumps({"max_position_embeddings": 4096}))
    return directory
