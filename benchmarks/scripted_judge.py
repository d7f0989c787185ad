"""An OpenAI-compatible endpoint on loopback that grades the demo's word problems, with noise and failures."""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
import re
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tidegate.envs.arithmetic import Arithmetic
from tidegate.envs.rewards import exact_answer

KNOWN = 6000
"""Training tasks whose answer the judge knows."""
_TASK = re.compile(r"<task-[0-9a-f]+>\n(.*?)\n</task-", re.DOTALL)
_ATTEMPT = re.compile(r"<attempt(?:-(\d+))?-[0-9a-f]{12}>\n(.*?)\n</attempt", re.DOTALL)


class ScriptedJudge:
    """Grades attempts by answers that it knows itself.

    Args:
        noise: Share of attempts whose grade is turned into its opposite.
        failing: Share of calls that fail: status 503, a reply without scores, or a closed connection.
        seed: Determines the failures.
    """

    def __init__(self, noise: float = 0.0, failing: float = 0.0, seed: int = 0) -> None:
        environment = Arithmetic()
        tasks = [environment.train_task(index) for index in range(KNOWN)]
        self._answers = {str(task.messages[-1]["content"]): task.answer for task in tasks}
        self._noise, self._failing = noise, failing
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self.calls = self.failures = 0

    def reply(self, body: Mapping[str, Any]) -> tuple[int, str]:
        """Returns the status and the text of a reply; status 0 closes the connection."""
        with self._lock:
            self.calls += 1
            failure = self._random.randrange(3) if self._random.random() < self._failing else None
            self.failures += failure is not None
        if failure is not None:
            return [(503, "overloaded"), (200, "I cannot decide."), (0, "")][failure]
        prompt = body["messages"][-1]["content"]
        [shown] = _TASK.findall(prompt)
        [answer] = {answer for question, answer in self._answers.items() if question in shown}
        scores = {name or "score": self._grade(work, answer) for name, work in _ATTEMPT.findall(prompt)}
        return 200, json.dumps({"scores": scores})

    def _grade(self, work: str, answer: Any) -> float:
        digest = hashlib.sha256(f"{answer}\0{work}".encode()).digest()
        wrong = int.from_bytes(digest[:4], "big") < self._noise * 2**32
        return abs(exact_answer(work, answer) - wrong)


@contextlib.contextmanager
def served(judge: ScriptedJudge) -> Iterator[str]:
    """Yields the base URL of a judge, which is served until the block ends."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status, text = judge.reply(body)
            if status == 0:
                self.close_connection = True
                return
            usage = {"prompt_tokens": len(str(body["messages"])) // 4, "completion_tokens": len(text) // 4}
            message = {"role": "assistant", "content": text}
            content = {"error": {"message": text}} if status != 200 else {
                "choices": [{"index": 0, "message": message, "finish_reason": "stop"}], "usage": usage,
            }  # fmt: skip
            data = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
