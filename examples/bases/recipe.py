"""Common parts of the base models' recipes: tokenizer, shape, batches of demonstrations, training."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = Path(__file__).parents[1] / "tiny_base" / "chat_template.jinja"

Message = dict[str, Any]


def train_tokenizer(
    words: Iterable[str], *, pattern: str, markers: Sequence[str], vocabulary: int
) -> PreTrainedTokenizerFast:
    """A deterministic byte-level BPE over a world's words, without merges across matches of `pattern`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - len(markers),
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(words, trainer)
    tokenizer.add_tokens(list(markers))  # ordinary text, so that they remain visible in decoded output
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", model_max_length=1024
    )
    fast.chat_template = TEMPLATE.read_text(encoding="utf-8")
    return fast


def random_model(
    tokenizer: PreTrainedTokenizerFast, *, seed: int, layers: int, init_std: float
) -> Qwen3ForCausalLM:
    """A Qwen3 of about a million parameters; `init_std` is the standard deviation of the weights."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        initializer_range=init_std,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model


def encode(
    tokenizer: PreTrainedTokenizerFast,
    messages: list[Message],
    tools: Sequence[Any],
    *,
    last_only: bool = False,
) -> tuple[list[int], list[int]]:
    """Ids of an episode, and a mask of the trained ones: all replies of the model, or only the last."""
    end_id = tokenizer.convert_tokens_to_ids("<|im_end|>")
    ids: list[int] = []
    mask: list[int] = []
    for end, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = tokenizer.apply_chat_template(
            messages[:end], tools=list(tools), add_generation_prompt=True, return_dict=False
        )
        whole = tokenizer.apply_chat_template(messages[: end + 1], tools=list(tools), return_dict=False)
        whole = whole[: len(whole) - whole[::-1].index(end_id)]
        trained = 0 if last_only and end < len(messages) - 1 else 1
        mask += [0] * (len(prompt) - len(ids)) + [trained] * (len(whole) - len(prompt))
        ids = whole
    return ids, mask


def padded(rows: Sequence[tuple[list[int], list[int]]], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, labels), each [rows, length]; labels are −100 for tokens that are not trained on."""
    longest = max(len(ids) for ids, _ in rows)
    ids_bt = torch.full((len(rows), longest), pad)
    labels_bt = torch.full((len(rows), longest), -100)
    for row, (ids, mask) in enumerate(rows):
        ids_bt[row, : len(ids)] = torch.tensor(ids)
        labels_bt[row, : len(ids)] = torch.where(torch.tensor(mask) == 1, torch.tensor(ids), -100)
    return ids_bt, labels_bt


def fit(
    model: Qwen3ForCausalLM,
    batches: Iterable[tuple[torch.Tensor, torch.Tensor]],
    optimizers: Sequence[torch.optim.Optimizer],
    *,
    steps: int,
    decay: Callable[[float], float],
    log_every: int,
) -> None:
    """Trains one step per batch. The learning rates rise over the first twentieth of the steps; then `decay`
    gives their factor at each fraction of the steps."""
    warmup = max(1, steps // 20)
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min((step + 1) / warmup, 1.0, decay(step / steps))
        )
        for optimizer in optimizers
    ]
    model.train()
    for step, (ids_bt, labels_bt) in enumerate(batches):
        # Padding is on the right, so that causal attention from real tokens never reaches it.
        loss = model(input_ids=ids_bt, labels=labels_bt).loss
        model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
        if step % log_every == 0 or step == steps - 1:
            print(f"step {step:4d}  loss {loss.item():.4f}", flush=True)
    model.eval()


def make(
    out: Path,
    tokenizer: PreTrainedTokenizerFast,
    model: Qwen3ForCausalLM,
    train: Callable[[Qwen3ForCausalLM, PreTrainedTokenizerFast], None],
) -> None:
    """Trains the model; saves model and tokenizer."""
    torch.set_num_threads(1)  # as for the published model; more threads change the order of summation
    print(f"{model.num_parameters():,} parameters, {len(tokenizer)} tokens")
    train(model, tokenizer)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    size = sum(file.stat().st_size for file in out.iterdir())
    print(f"{out}: {size / 1e6:.2f} MB")


def muon_and_adamw(model: Qwen3ForCausalLM) -> list[torch.optim.Optimizer]:
    """Muon (Jordan et al. 2024) for the layers' matrices, AdamW for embeddings and norms."""
    matrices = [
        weight for name, weight in model.named_parameters() if weight.ndim == 2 and "embed" not in name
    ]
    others = [weight for name, weight in model.named_parameters() if weight.ndim != 2 or "embed" in name]
    return [
        torch.optim.Muon(matrices, lr=0.02, weight_decay=0.01),
        torch.optim.AdamW(others, lr=3e-3, betas=(0.9, 0.98), weight_decay=0.01),
    ]


def decay_in_second_half(progress: float) -> float:
    """Factor of a learning rate that falls linearly in the second half of the steps."""
    return max(0.05, 2 * (1 - progress))


def main(
    description: str,
    make_tokenizer: Callable[[], PreTrainedTokenizerFast],
    make_model: Callable[[PreTrainedTokenizerFast], Qwen3ForCausalLM],
    train: Callable[[Qwen3ForCausalLM, PreTrainedTokenizerFast, float], None],
) -> None:
    """Makes a model as the command line says; `train` has stages, whose steps are scaled."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="directory of the model")
    parser.add_argument("--scale", type=float, default=1.0, help="factor for the steps of every stage")
    arguments = parser.parse_args()
    tokenizer = make_tokenizer()

    def scaled(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
        train(model, tokenizer, arguments.scale)

    make(arguments.out, tokenizer, make_model(tokenizer), scaled)
