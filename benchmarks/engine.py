"""Compares the speed of the embedded engine with transformers.

    python benchmarks/engine.py [--json] [--repeats 3] [--model DIR]

The model is `examples/tiny_base/model` (Qwen3, 4 layers, hidden 128, float32), one torch thread per system,
temperature 1. The engine returns exact logprobs and version spans with every token; the others return
neither. All systems of a comparison run in every repeat, one after the other (with 64 requests three times,
because runs of half a second vary by a tenth). Each figure is the median over the repeats. A ratio is the
median of the per-repeat ratios to the system with the best median.

- *Equal lengths*: 1, 16, 64, 128 requests at once, 64 tokens in, 64 out. `engine` is a `tidegate engine`
  process called over HTTP, as the gateway calls it; `generate` is transformers' `generate` on one batch in
  this process, with the faster of its caches (dynamic or static).
- *Decode only*: the engine's scheduler in this process, against a loop that calls the model and samples with
  `torch.multinomial`, with the faster cache; both measured after prefill, 64 tokens out.
- *Mixed arrivals*: 64 clients over HTTP request 192 replies in all, each as soon as its previous reply
  arrived; 16 to 256 tokens in and 16 to 256 out, both uniform. `generate` has all 192 requests from the
  start and processes them in order in batches of 64, padded on the left; each batch ends with its longest
  reply. Only requested tokens count.
- *Prefix reuse*: 16 sessions with a history of 512 tokens add 32 tokens and request 16; the time from the
  first request to the last reply, over HTTP, compared with an engine with `--engine.prefix_cache_mb 0`.
- *bfloat16*: decode as above with 1 and 64 rows, also on a random model of 17 million parameters.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import numpy as np
import torch
from common import Check, parser_of, report
from transformers import DynamicCache, Qwen3Config, Qwen3ForCausalLM, StaticCache

from tidegate.engine.model.model import Model, load_model
from tidegate.engine.options import EngineOptions
from tidegate.engine.requests.params import TokenLimits
from tidegate.engine.requests.request import parse_generate
from tidegate.engine.scheduling.scheduler import Scheduler
from tidegate.weights.internals import cache_argument

MODEL = Path(__file__).parents[1] / "examples" / "tiny_base" / "model"
COUNTS = (1, 16, 64, 128)
LENGTH = 64
CLIENTS, MIXED, SHORTEST, LONGEST = 64, 192, 16, 256
SESSIONS, HISTORY, QUESTION, ANSWER = 16, 512, 32, 16
SLOTS, CONTEXT = 128, 1024
WIDE = {"hidden_size": 768, "intermediate_size": 2304, "num_hidden_layers": 2, "num_attention_heads": 12,
        "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 4096, "max_position_embeddings": 1024,
        "tie_word_embeddings": True, "bos_token_id": None, "eos_token_id": None}  # fmt: skip


@dataclass(frozen=True)
class Ask:
    """A prompt and the number of tokens of its reply."""

    prompt: list[int]
    tokens: int

    def body(self, seed: int) -> dict[str, Any]:
        params = {"max_new_tokens": self.tokens, "ignore_eos": True, "sampling_seed": seed}
        return {"input_ids": self.prompt, "sampling_params": params, "return_logprob": True}


@dataclass
class Figures:
    """Seconds of each system in each repeat."""

    seconds: dict[str, list[float]] = field(default_factory=dict)

    def add(self, name: str, seconds: float) -> None:
        self.seconds.setdefault(name, []).append(seconds)

    def median(self, *names: str) -> float:
        """The fastest of these systems, by median."""
        return min(median(self.seconds[name]) for name in names)

    def ratio(self, mine: str, *others: str) -> float:
        """Speedup over the best other system, as the median of per-repeat ratios: other load on the machine
        slows both systems of a repeat. The best is chosen by median; a choice per repeat would bias the
        ratio."""
        best = min(others, key=lambda name: median(self.seconds[name]))
        return median(
            theirs / seconds for seconds, theirs in zip(self.seconds[mine], self.seconds[best], strict=True)
        )


class Prompts:
    """Seeded random prompts, all different, so that no prompt hits the prefix cache."""

    def __init__(self, vocab: int) -> None:
        self.rng = np.random.default_rng(0)
        self.vocab = vocab

    def draw(self, length: int) -> list[int]:
        return self.rng.integers(3, self.vocab, length).tolist()

    def equal(self, count: int) -> list[Ask]:
        return [Ask(self.draw(LENGTH), LENGTH) for _ in range(count)]

    def mixed(self, count: int) -> list[Ask]:
        lengths = self.rng.integers(SHORTEST, LONGEST + 1, (count, 2)).tolist()
        return [Ask(self.draw(prompt), reply) for prompt, reply in lengths]


# -- transformers


@torch.inference_mode()
def generate(model: Any, asks: Sequence[Ask], cache: str) -> float:
    """Seconds for one batch, padded on the left to its longest prompt, until its longest reply ends."""
    longest, tokens = max(len(ask.prompt) for ask in asks), max(ask.tokens for ask in asks)
    ids = torch.zeros((len(asks), longest), dtype=torch.long)
    for row, ask in enumerate(asks):
        ids[row, longest - len(ask.prompt) :] = torch.tensor(ask.prompt)
    more = {"cache_implementation": "static", "disable_compile": True} if cache == "static" else {}
    began = time.perf_counter()
    out = model.generate(
        input_ids=ids, attention_mask=(ids > 0).long(), do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
        max_new_tokens=tokens, min_new_tokens=tokens, pad_token_id=0, **more,
    )  # fmt: skip
    assert out.shape[1] == longest + tokens
    return time.perf_counter() - began


@torch.inference_mode()
def bare_loop(model: Any, asks: Sequence[Ask], cache: str) -> float:
    """Seconds of decoding alone: model, softmax, sampling; no bookkeeping, logprobs or stop checks."""
    ids = torch.tensor([ask.prompt for ask in asks])
    if cache == "static":
        past: Any = StaticCache(config=model.config, max_cache_len=2 * LENGTH)
    else:
        past = DynamicCache(config=model.config)
    options = {cache_argument(model): past, "use_cache": True, "logits_to_keep": 1}
    model(input_ids=ids[:, :-1], **options)
    last = ids[:, -1:]
    began = time.perf_counter()
    for _ in range(LENGTH):
        logits = model(input_ids=last, **options).logits[:, -1]
        last = torch.multinomial(logits.softmax(-1), 1)
    return time.perf_counter() - began


def engine_decode(model: Model, asks: Sequence[Ask]) -> float:
    """Seconds of decoding alone: the scheduler's steps after all requests were prefilled."""
    scheduler = Scheduler(model, max_slots=SLOTS, version="0", deliver=lambda _: None)
    limits = TokenLimits(model.vocab_size, CONTEXT, frozenset(), False)
    for seed, ask in enumerate(asks):
        scheduler.submit(parse_generate(ask.body(seed), limits))
    scheduler.run_once()
    while scheduler.num_waiting:
        scheduler.run_once()
    sampled, began = scheduler.counters.tokens_sampled, time.perf_counter()
    while scheduler.num_running:
        scheduler.run_once()
    seconds = time.perf_counter() - began
    due = sum(ask.tokens for ask in asks)
    assert scheduler.counters.tokens_sampled == due
    return seconds * due / (due - sampled)


# -- the engine over HTTP


@contextlib.contextmanager
def serving(model: Path, prefix_mb: int, slots: int = SLOTS, context: int = CONTEXT) -> Iterator[str]:
    """The URL of a `tidegate engine` process."""
    with tempfile.TemporaryDirectory() as directory:
        announce = Path(directory) / "engine.json"
        process = subprocess.Popen(
            [sys.executable, "-m", "tidegate", "engine", "--model.path", str(model), "--port", "0", "--owned",
             f"--engine.max_slots={slots}", f"--engine.max_context={context}",
             f"--engine.prefix_cache_mb={prefix_mb}", "--announce", str(announce)],
            stdin=subprocess.PIPE,
        )  # fmt: skip
        try:
            deadline = time.monotonic() + 120
            while not announce.exists():
                if process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit("the engine did not start")
                time.sleep(0.05)
            yield json.loads(announce.read_text())["url"]
        finally:
            process.terminate()
            process.wait(30)


class Serve:
    def __init__(self, http: aiohttp.ClientSession) -> None:
        self.http = http
        self.asked = 0

    async def one(self, ask: Ask) -> dict[str, Any]:
        self.asked += 1
        async with self.http.post("/generate", json=ask.body(self.asked)) as reply:
            given = await reply.json()
        assert len(given["output_ids"]) == len(given["meta_info"]["output_token_logprobs"]) == ask.tokens
        return given

    async def together(self, asks: Sequence[Ask]) -> float:
        """Seconds until all replies to simultaneous requests have arrived."""
        began = time.perf_counter()
        await asyncio.gather(*map(self.one, asks))
        return time.perf_counter() - began

    async def clients(self, asks: Sequence[Ask]) -> float:
        """Seconds for CLIENTS clients, each of which sends its next request when its reply arrives."""
        queue = iter(asks)

        async def client() -> None:
            for ask in queue:
                await self.one(ask)

        began = time.perf_counter()
        await asyncio.gather(*(client() for _ in range(CLIENTS)))
        return time.perf_counter() - began

    async def second_turn(self, prompts: Prompts) -> tuple[float, float]:
        """Seconds for the second turn of SESSIONS sessions, and the cached share of their history."""
        first = [Ask(prompts.draw(HISTORY - ANSWER), ANSWER) for _ in range(SESSIONS)]
        replies = await asyncio.gather(*map(self.one, first))
        histories = [ask.prompt + reply["output_ids"] for ask, reply in zip(first, replies, strict=True)]
        second = [Ask(history + prompts.draw(QUESTION), ANSWER) for history in histories]
        began = time.perf_counter()
        replies = await asyncio.gather(*map(self.one, second))
        seconds = time.perf_counter() - began
        cached = sum(reply["meta_info"]["cached_tokens"] for reply in replies)
        return seconds, cached / (SESSIONS * HISTORY)


# -- the comparisons


@contextlib.asynccontextmanager
async def client_of(url: str) -> AsyncIterator[Serve]:
    async with aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(limit=0)) as http:
        yield Serve(http)


async def measure(
    path: Path, url: str, forgetful_url: str, repeats: int
) -> tuple[list[dict[str, Any]], list[Check]]:
    model = load_model(EngineOptions(path, max_slots=SLOTS, max_context=CONTEXT))
    prompts = Prompts(model.vocab_size)
    equal = {count: Figures() for count in COUNTS}
    decode = {count: Figures() for count in COUNTS}
    mixed, prefix, shares = Figures(), Figures(), []
    async with client_of(url) as engine, client_of(forgetful_url) as forgetful:
        await engine.together(prompts.equal(16))  # warm-up before timing
        await forgetful.together(prompts.equal(16))
        for cache in ("dynamic", "static"):
            generate(model.hf_model, prompts.equal(2), cache)
        due = []
        for _ in range(repeats):
            for count in (*COUNTS, 64, 64):
                await _equal(model, engine, prompts, count, equal[count], decode[count])
            due.append(await _mixed(model, engine, prompts, mixed))
            for name, serve in (("kept", engine), ("forgotten", forgetful)):
                seconds, share = await serve.second_turn(prompts)
                prefix.add(name, seconds)
                shares += [share] if serve is engine else []
    return _judge(equal, decode, mixed, median(due), prefix, median(shares))


async def _equal(
    model: Model, engine: Serve, prompts: Prompts, count: int, equal: Figures, decode: Figures
) -> None:
    equal.add("engine", await engine.together(prompts.equal(count)))
    decode.add("engine", engine_decode(model, prompts.equal(count)))
    for cache in ("dynamic", "static"):
        equal.add(cache, generate(model.hf_model, prompts.equal(count), cache))
        decode.add(cache, bare_loop(model.hf_model, prompts.equal(count), cache))


async def _mixed(model: Model, engine: Serve, prompts: Prompts, mixed: Figures) -> float:
    """Returns the number of requested tokens."""
    asks = prompts.mixed(MIXED)
    mixed.add("engine", await engine.clients(asks))
    batches = [asks[start : start + CLIENTS] for start in range(0, MIXED, CLIENTS)]
    for cache in ("dynamic", "static"):
        mixed.add(cache, sum(generate(model.hf_model, batch, cache) for batch in batches))
    return sum(ask.tokens for ask in asks)


def _judge(
    equal: dict[int, Figures],
    decode: dict[int, Figures],
    mixed: Figures,
    due: float,
    prefix: Figures,
    share: float,
) -> tuple[list[dict[str, Any]], list[Check]]:
    def row(what: str, figures: Figures, tokens: float, other: str) -> dict[str, Any]:
        engine, best = figures.median("engine"), figures.median("dynamic", "static")
        rates = {"engine_tokens_s": round(tokens / engine), f"{other}_tokens_s": round(tokens / best)}
        return {"what": what, **rates, "ratio": figures.ratio("engine", "dynamic", "static")}

    equal_rows = {n: row(f"equal lengths, {n}", equal[n], n * LENGTH, "generate") for n in COUNTS}
    decode_rows = {n: row(f"decode only, {n}", decode[n], n * LENGTH, "loop") for n in COUNTS}
    mixed_row = row("mixed arrivals, 64", mixed, due, "generate")
    times = {f"{name}_s": prefix.median(name) for name in ("kept", "forgotten")}
    prefix_row = {"what": "second turn", **times, "ratio": prefix.ratio("kept", "forgotten"), "cached": share}
    results = [*equal_rows.values(), *decode_rows.values(), mixed_row, prefix_row]
    checks = [
        Check("equal_lengths_vs_generate_64", equal_rows[64]["ratio"], ">=", 1.0),
        Check("mixed_arrivals_vs_generate_64", mixed_row["ratio"], ">=", 1.5),
        Check("vs_bare_loop_64", decode_rows[64]["ratio"], ">=", 0.6),
        Check("prefix_reuse_second_turn_speedup", prefix_row["ratio"], ">=", 2.0),
    ]
    return results, checks


def bfloat16(path: Path, repeats: int) -> Iterator[dict[str, Any]]:
    """Decodes in float32 and bfloat16, with the benchmark's model and with a wider one."""
    with tempfile.TemporaryDirectory() as directory:
        torch.manual_seed(0)
        Qwen3ForCausalLM(Qwen3Config(**WIDE)).save_pretrained(directory)
        for name, model in (("tiny", path), ("wide", Path(directory))):
            figures = {count: Figures() for count in (1, 64)}
            loaded = {
                dtype: load_model(EngineOptions(model, dtype=dtype, max_slots=SLOTS, max_context=CONTEXT))
                for dtype in ("float32", "bfloat16")
            }
            prompts = Prompts(loaded["float32"].vocab_size)
            for _ in range(repeats):
                for count, dtype in ((count, dtype) for count in figures for dtype in loaded):
                    figures[count].add(dtype, engine_decode(loaded[dtype], prompts.equal(count)))
            for count, taken in figures.items():
                rates = {f"{dtype}_tokens_s": round(count * LENGTH / taken.median(dtype)) for dtype in loaded}
                yield {"what": f"{name} model, decode only, {count}", **rates}


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--repeats", type=int, default=3, help="runs per comparison; medians are shown")
    parser.add_argument("--model", type=Path, default=MODEL)
    arguments = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    with serving(arguments.model, 256) as url, serving(arguments.model, 0) as forgetful_url:
        results, checks = asyncio.run(measure(arguments.model, url, forgetful_url, arguments.repeats))
    results += bfloat16(arguments.model, min(arguments.repeats, 2))
    return report(results, checks, as_json=arguments.json)


if __name__ == "__main__":
    sys.exit(main())
