"""Runs math-verify in a separate process, because parsing a model's output with sympy may never end.

One process serves all threads, one comparison at a time. A comparison that exceeds its timeout is killed with
the process, and the next one starts another. The process exits when its stdin closes. It is this module as a
program, which reads and writes lines of JSON:

-> {"ready": true}
<- {"output": TEXT, "answer": TEXT}
-> {"parsed": BOOL, "equal": BOOL}, or {"error": TEXT}
"""

from __future__ import annotations

import atexit
import functools
import importlib.util
import json
import os
import select
import subprocess
import sys
import threading
from dataclasses import dataclass
from typing import Any

from tidegate.errors import ConfigError, RewardError
from tidegate.program import advise_extra
from tidegate.service.parent_death import continue_at_parent_exit
from tidegate.service.process import machine_load

LIMIT_S = 10.0
START_S = 60.0
MAX_TEXT = 20_000
"""Number of characters, from the end, that are parsed."""


@dataclass(frozen=True, slots=True)
class MathVerdict:
    """Whether the output could be parsed, and whether it equals the answer."""

    parsed: bool
    equal: bool


def require_math_verify(what: str) -> None:
    """Raises ConfigError, which names the user `what`, if math-verify is not installed."""
    if importlib.util.find_spec("math_verify") is None:
        raise ConfigError(f"{what} needs math-verify, which is not installed: {advise_extra('math')}")


def verify(output: str, answer: str) -> MathVerdict:
    """Compares by math-verify; raises RewardError if it takes longer than LIMIT_S, fails, or cannot read
    the answer."""
    return _shared().verify(output[-MAX_TEXT:], answer)


@functools.cache
def _shared() -> Verifier:
    verifier = Verifier()
    atexit.register(verifier.close)
    return verifier


class Verifier:
    """Owns the process, which the first comparison starts."""

    def __init__(self, limit_s: float = LIMIT_S) -> None:
        self.limit_s = limit_s
        self.starts = 0
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def verify(self, output: str, answer: str) -> MathVerdict:
        with self._lock:
            process = self._running()
            assert process.stdin is not None
            try:
                process.stdin.write(json.dumps({"output": output, "answer": answer}).encode() + b"\n")
                process.stdin.flush()
                line = _read_line(process, self.limit_s)
            except TimeoutError:
                self._end()
                raise RewardError(f"math-verify took longer than {self.limit_s:g} s") from None
            except BrokenPipeError:
                line = b""
            if not line:
                self._end()
                raise RewardError("math-verify's process exited")
        reply = json.loads(line)
        if "error" in reply:
            raise RewardError(f"math-verify: {reply['error']}")
        return MathVerdict(reply["parsed"], reply["equal"])

    def close(self) -> None:
        with self._lock:
            self._end()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._end()
        require_math_verify("this reward")
        self.starts += 1
        command = [sys.executable, "-P", "-m", "tidegate.envs.grading.math_verify"]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._process = process
        try:
            ready = _read_line(process, START_S)  # sent after its imports
        except TimeoutError:
            self._end()
            raise RewardError(f"math-verify was not ready after {START_S:g} s; {machine_load()}") from None
        if not ready:
            self._end()
            raise RewardError("math-verify could not be started; its process ended at once")
        return process

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


def _read_line(process: subprocess.Popen[bytes], limit_s: float) -> bytes:
    """Returns the next reply, empty if the process has exited. Raises TimeoutError."""
    assert process.stdout is not None
    readable = select.poll()  # takes any file descriptor, unlike `select`
    readable.register(process.stdout, select.POLLIN)
    if not readable.poll(limit_s * 1000):
        raise TimeoutError
    return process.stdout.readline()


def main() -> None:
    continue_at_parent_exit()
    from math_verify import parse, verify

    # The library's own output goes to stderr.
    stdout = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def emit(reply: dict[str, Any]) -> None:
        stdout.write(json.dumps(reply) + "\n")
        stdout.flush()

    emit({"ready": True})
    for line in sys.stdin.buffer:
        texts = json.loads(line)
        try:
            gold = parse(f"${texts['answer']}$")
            if not gold:
                answer = texts["answer"][:80]
                emit({"error": f"the right answer {answer!r} cannot be read; write it as one expression"})
                continue
            output = parse(texts["output"])
            emit({"parsed": bool(output), "equal": bool(output) and bool(verify(gold, output))})
        except Exception as error:  # noqa: BLE001 - becomes the reward's error
            emit({"error": f"{type(error).__name__}: {error}"})


if __name__ == "__main__":
    main()
