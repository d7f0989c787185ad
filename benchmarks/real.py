"""Compares engine and trainer with other programs on a real language model, SmolLM2-135M-Instruct in float32.

    python benchmarks/real.py [--json] [--repeats 3] [--model DIR] [--vllm PYTHON] [--only NAME ...]

Figures are CPU seconds of whole process trees, one torch thread each; the systems of a comparison alternate,
and the best of `--repeats` of each counts. The model is `tidegate convert smollm2`, made once in
`build/smollm2`.

- `engine`: 64 requests at once over HTTP, with logprobs, as in `make demo`: four prompts of the words demo
  (two questions in each), each for 16 replies of 16 to 32 tokens, uniformly. The client's CPU is included.
  `generate` is transformers' `generate` in this process on one batch, padded on the left, with the faster of
  its caches; it ends with the longest reply. `PYTHON` is the interpreter of vLLM's environment
  (`make test-vllm` makes one); vLLM has its defaults (prefix caching, compiled model) in float32, and gets
  the same requests. Only requested tokens count. A second row has 64 different prompts.
- `step`: an optimiser step on four groups of 8 with such a prompt and replies of 16,
  against the plain loop of `step.py`.
- `memory`: the peak resident memory of an engine with all slots filled to their context and of a trainer
  with a full microbatch, against the plan of `tidegate train --dry-run`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import psutil
import step as steps
import torch
from common import Check, parser_of, report
from engine import Ask, Serve, client_of, generate, serving
from step import compare, our_step, plain_step
from transformers import AutoModelForCausalLM, AutoTokenizer
from vs_trl import cpu_seconds

from tidegate.config import Settings, TrainerSettings, load_settings
from tidegate.envs.base import load_environment
from tidegate.plan.memory import memory_plan
from tidegate.plan.shape import read_shape
from tidegate.trainer.batch.rows import TrainingSequence
from tidegate.trainer.policy.policy import Policy

ROOT = Path(__file__).parents[1]
WORDS = ROOT / "examples" / "words" / "config.toml"
REQUESTS, GROUP = 64, 16
SHORTEST, LONGEST = 16, 32
GROUPS, SIZE, REPLY = 4, 8, 16
SLOTS, CONTEXT = 64, 256


class Questions:
    """Two questions of the words demo in each prompt (42 to 61 tokens), every one different."""

    def __init__(self, model: Path) -> None:
        settings = load_settings(WORDS, [])
        self.environment = load_environment(settings.env.use, settings.env.options)
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.rng = np.random.default_rng(0)
        self.asked = 0

    def draw(self) -> list[int]:
        tasks = [self.environment.train_task(self.asked + index) for index in range(2)]
        self.asked += 2
        question = "\n".join(task.messages[1]["content"] for task in tasks)
        messages = [tasks[0].messages[0], {"role": "user", "content": question}]
        ids: list[int] = self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )
        return ids

    def asks(self, group: int) -> list[Ask]:
        prompts = [self.draw() for _ in range(REQUESTS // group)]
        lengths = self.rng.integers(SHORTEST, LONGEST + 1, REQUESTS).tolist()
        return [Ask(prompts[index // group], length) for index, length in enumerate(lengths)]


# -- engines


class VLLM:
    """Calls vLLM as the gateway does."""

    def __init__(self, http: aiohttp.ClientSession) -> None:
        self.http = http

    async def one(self, ask: Ask) -> None:
        params = {"temperature": 1.0, "max_tokens": ask.tokens, "ignore_eos": True, "logprobs": 0}
        body = {"token_ids": ask.prompt, "sampling_params": {**params, "detokenize": False}}
        async with self.http.post("/inference/v1/generate", json=body) as reply:
            (choice,) = (await reply.json())["choices"]
        assert len(choice["token_ids"]) == len(choice["logprobs"]["content"]) == ask.tokens

    async def together(self, asks: Sequence[Ask]) -> None:
        await asyncio.gather(*map(self.one, asks))


@contextlib.contextmanager
def vllm(python: str, model: Path, log: Path) -> Iterator[str]:
    """The URL of a vLLM server."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--host", "127.0.0.1",
        "--port", str(port), "--dtype", "float32", "--max-model-len", "1024", "--enable-scale-out",
        "--max-num-seqs", str(REQUESTS), "--logprobs-mode", "processed_logprobs",
    ]  # fmt: skip
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    with log.open("w", encoding="utf-8") as output, subprocess.Popen(
        command, env=environment, stdout=output, stderr=subprocess.STDOUT
    ) as process:  # fmt: skip
        try:
            asyncio.run(ready(url, process, log))
            yield url
        finally:
            process.terminate()
            process.wait(60)


async def ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 900
    async with aiohttp.ClientSession(url) as http:
        while True:
            with contextlib.suppress(aiohttp.ClientError):
                async with http.get("/health") as reply:
                    if reply.status == 200:
                        return
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"vLLM did not start: {log}")
            await asyncio.sleep(0.5)


def server_of(url: str) -> psutil.Process:
    """The child process that listens at the URL, or whose child does."""
    port = int(url.rsplit(":", 1)[1])
    for child in psutil.Process().children():
        tree = [child, *child.children(recursive=True)]
        if any(one.laddr.port == port for process in tree for one in process.net_connections()):
            return child
    raise SystemExit(f"no process listens at {url}")


def served(url: str, make: Callable[[aiohttp.ClientSession], Any], asks: Sequence[Ask]) -> float:
    """CPU seconds of a server's process tree and of the client."""

    async def call() -> None:
        async with client_of(url) as client:
            await make(client.http).together(asks)

    tree = server_of(url)
    began = cpu_seconds(tree) + time.process_time()
    asyncio.run(call())
    return cpu_seconds(tree) + time.process_time() - began


def timed_generate(model: Any, asks: Sequence[Ask], cache: str) -> float:
    began = time.process_time()
    generate(model, asks, cache)
    return time.process_time() - began


async def logprob_error(url: str, plain: Any, asks: Sequence[Ask]) -> float:
    """Largest difference between the engine's logprobs and those of plain transformers."""
    worst = 0.0
    async with client_of(url) as client:
        for ask, reply in zip(asks, await asyncio.gather(*map(client.one, asks)), strict=True):
            ids = torch.tensor([ask.prompt + reply["output_ids"]])
            with torch.inference_mode():
                logprobs_tv = plain(input_ids=ids).logits[0, len(ask.prompt) - 1 : -1].log_softmax(-1)
            given = torch.tensor([one[0] for one in reply["meta_info"]["output_token_logprobs"]])
            expected = logprobs_tv.gather(-1, torch.tensor(reply["output_ids"])[:, None])[:, 0]
            worst = max(worst, float((given - expected).abs().max()))
    return worst


def engines(model: Path, arguments: argparse.Namespace) -> tuple[list[dict[str, Any]], list[Check]]:
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    questions = Questions(model)
    best: dict[tuple[int, str], float] = {}
    results = []
    with contextlib.ExitStack() as stack:
        url = stack.enter_context(serving(model, 256))
        systems: dict[str, Callable[[Sequence[Ask]], float]] = {
            "engine": lambda asks: served(url, Serve, asks),
            "generate": lambda asks: timed_generate(plain, asks, "dynamic"),
            "generate_static": lambda asks: timed_generate(plain, asks, "static"),
        }
        if arguments.vllm:
            log = ROOT / "build" / "vllm.log"
            other = stack.enter_context(vllm(arguments.vllm, model, log))
            systems["vllm"] = lambda asks: served(other, VLLM, asks)
        for name in ("engine", "vllm"):  # warm-up
            if name in systems:
                systems[name](questions.asks(GROUP))
        for _ in range(arguments.repeats):
            for group in (GROUP, 1):
                asks = questions.asks(group)
                due = sum(ask.tokens for ask in asks)
                for name, system in systems.items():
                    rate = due / system(asks)
                    best[group, name] = max(best.get((group, name), 0.0), rate)
        error = asyncio.run(logprob_error(url, plain, questions.asks(GROUP)[::8]))
    for group, what in ((GROUP, "4 prompts × 16"), (1, "64 prompts")):
        rates = {name: best[group, name] for name in systems}
        results.append({"what": what, **{f"{name}_tokens_cpu_s": rate for name, rate in rates.items()}})
    rates = {name: best[GROUP, name] for name in systems}
    ratio = rates["engine"] / max(rates["generate"], rates["generate_static"])
    checks = [Check("engine_vs_generate_64", ratio, ">=", 1.5)]
    checks.append(Check("logprob_max_error", error, "<=", 1e-4))
    if "vllm" in rates:
        checks.append(Check("engine_vs_vllm_cpu_64", rates["engine"] / rates["vllm"], ">=", 0.8))
    return results, checks


# -- trainer


def row(prompt: np.ndarray, reply: np.ndarray, group: str, advantage: float) -> TrainingSequence:
    ids = np.concatenate([prompt, reply]).astype(np.int32)
    mask = np.arange(len(ids)) >= len(prompt)
    return TrainingSequence(
        ids, mask, np.where(mask, -5.0, 0.0).astype(np.float32), np.where(mask, 0, -1),
        np.ones(len(ids), np.float32), np.where(mask, advantage, 0.0).astype(np.float32), group_id=group,
    )  # fmt: skip


def step(model: Path, arguments: argparse.Namespace) -> tuple[list[dict[str, Any]], list[Check]]:
    rng, questions = np.random.default_rng(0), Questions(model)
    rows = []
    for group in range(GROUPS):
        prompt = np.array(questions.draw())
        for index in range(SIZE):
            reply = rng.integers(0, len(questions.tokenizer), REPLY)
            rows.append(row(prompt, reply, str(group), (-1.0) ** index))
    settings = TrainerSettings(**steps.SETTINGS)
    policy = Policy.load(model, settings)
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    taken = compare(
        {"tidegate": our_step(policy, rows, []), "plain": plain_step(plain, rows)}, arguments.repeats
    )
    tokens = sum(one.inputs for one in rows)
    results = [
        {"what": "optimiser step", "step": name, "cpu_s": min(seconds), "tokens_cpu_s": tokens / min(seconds)}
        for name, seconds in taken.items()
    ]
    return results, [Check("step_vs_plain", min(taken["plain"]) / min(taken["tidegate"]), ">=", 2.0)]


# -- memory


def peak_bytes(pid: int) -> int:
    """Peak resident memory of a process."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def memory_settings(model: Path) -> Settings:
    return load_settings(WORDS, [f"--model.path={model}", "--trainer.microbatch_tokens=1024"])


def train_once(model: Path) -> int:
    """Takes two steps on full microbatches of different lengths; prints the peak memory."""
    settings = memory_settings(model)
    policy = Policy.load(model, settings.trainer)
    rng = np.random.default_rng(0)
    width = settings.trainer.microbatch_tokens // 16
    rows = [
        row(rng.integers(0, 1000, 8), rng.integers(0, 1000, width - 7), "g", (-1.0) ** index)
        for index in range(16)
    ]
    for _ in range(2):
        policy.update(rows, version=0)
    print(peak_bytes(os.getpid()))
    return 0


def memory(model: Path, arguments: argparse.Namespace) -> tuple[list[dict[str, Any]], list[Check]]:
    settings = memory_settings(model)
    peaks = {"engine": filled_engine(model, settings)}
    command = [sys.executable, __file__, "--train-once", "--model", str(model)]
    trained = subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=1800)
    peaks["trainer"] = int(trained.stdout.split()[-1])
    results, checks = [], []
    for owner, peak in peaks.items():
        items = [item for item in memory_plan(settings, read_shape(model)) if item.owner == owner]
        planned = sum(item.size for item in items)
        parts = {item.what.replace(" ", "_"): round(item.size / 1e6) for item in items}
        results.append({"what": f"memory, {owner}", "peak_mb": peak / 1e6, "plan_mb": planned / 1e6, **parts})
        checks += [
            Check(f"memory_vs_plan_{owner}", peak / planned, ">=", 0.8),
            Check(f"memory_vs_plan_{owner}", peak / planned, "<=", 1.1),
        ]
    return results, checks


def filled_engine(model: Path, settings: Settings) -> int:
    """Peak memory of the engine with every slot full, and more prefixes than it keeps."""
    rng = np.random.default_rng(0)
    engine = settings.engine
    with serving(model, engine.prefix_cache_mb, engine.max_slots, engine.max_context) as url:

        async def fill() -> None:
            async with client_of(url) as client:
                for _ in range(2):
                    await client.together([
                        Ask(rng.integers(0, 1000, engine.max_context - 16).tolist(), 16)
                        for _ in range(engine.max_slots)
                    ])  # fmt: skip

        asyncio.run(fill())
        return peak_bytes(server_of(url).pid)


def find_model(given: Path | None) -> Path:
    model = given or ROOT / "build" / "smollm2"
    if not model.is_dir():
        command = [sys.executable, "-m", "tidegate", "convert", "smollm2", "--out", str(model)]
        subprocess.run(command, check=True, timeout=1800)
    return model


PARTS = {"engine": engines, "step": step, "memory": memory}


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--model", type=Path, help="default: build/smollm2")
    parser.add_argument("--vllm", metavar="PYTHON", help="interpreter of an environment with vLLM")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="NAME")
    parser.add_argument("--train-once", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    model = find_model(arguments.model)
    if arguments.train_once:
        return train_once(model)
    results, checks = [], []
    for name in arguments.only:
        found, held = PARTS[name](model, arguments)
        results += found
        checks += held
    return report(results, checks, as_json=arguments.json)


if __name__ == "__main__":
    sys.exit(main())
