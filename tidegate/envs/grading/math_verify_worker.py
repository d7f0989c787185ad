"""Main of the process that runs math-verify: reads and writes JSON lines.

    python -m tidegate.envs.grading.math_verify_worker


-> {"ready": true}
<- {"output": TEXT, "answer": TEXT}
-> {"parsed": BOOL, "equal": BOOL}, or {"error": TEXT}
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from tidegate.service.parent_death import continue_at_parent_exit


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
            output = parse(texts["output"])
            emit({"parsed": bool(output), "equal": bool(output) and bool(verify(gold, output))})
        except Exception as error:  # noqa: BLE001 - becomes the reward's error
            emit({"error": f"{type(error).__name__}: {error}"})


if __name__ == "__main__":
    main()
