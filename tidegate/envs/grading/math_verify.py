"""Runs math-verify in a separate process, because parsing a model's output with sympy may never end.

One process serves all threads, one comparison at a time. A comparison that exceeds its timeout is killed with
the process, and the next one starts another. The process exits when its stdin closes.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib.util
import json
import subprocess
import sys
import threading
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from tidegate.errors import ConfigError, RewardError

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
        raise ConfigError(f"{what} needs math-verify, which is not installed: pip install 'tidegate[math]'")


def verify(output: str, answer: str) -> MathVerdict:
    """Compares by math-verify; raises RewardError if it takes longer than LIMIT_S or fails."""
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
        self._replies: SimpleQueue[bytes] = SimpleQueue()

    def verify(self, output: str, answer: str) -> MathVerdict:
        with self._lock:
            process = self._running()
            assert process.stdin is not None
            try:
                process.stdin.write(json.dumps({"output": output, "answer": answer}).encode() + b"\n")
                process.stdin.flush()
                line = self._replies.get(timeout=self.limit_s)
            except Empty:
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
        process = subprocess.Popen(
            [sys.executable, "-m", "tidegate.envs.grading.math_verify_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        replies: SimpleQueue[bytes] = SimpleQueue()
        threading.Thread(target=_read, args=(process, replies), daemon=True, name="math-verify").start()
        self._process, self._replies = process, replies
        try:
            greeting = replies.get(timeout=START_S)  # sent after its imports
        except Empty:
            self._end()
            raise RewardError(f"math-verify was not ready after {START_S:g} s") from None
        if not greeting:
            self._end()
            raise RewardError("math-verify could not be started; its process ended at once")
        return process

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            assert self._process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
            self._process = None


def _read(process: subprocess.Popen[bytes], replies: SimpleQueue[bytes]) -> None:
    """Puts each line into the queue, and an empty one when the process has exited."""
    assert process.stdout is not None
    with process.stdout:
        for line in process.stdout:
            replies.put(line)
    replies.put(b"")
