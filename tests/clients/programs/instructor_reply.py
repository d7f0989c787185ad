"""A reply of a pydantic type through instructor, with its retries: `chat`, `responses` or `messages`."""

from __future__ import annotations

from typing import Any

import instructor
from calculator import MODEL
from pydantic import BaseModel, field_validator
from solving import DIALECT, QUESTION, STREAM, calls, report


class Bill(BaseModel):
    """What is paid."""

    total: int

    @field_validator("total")
    @classmethod
    def adds_up(cls, value: int) -> int:
        calls.append(str(value))
        if value != 140:
            raise ValueError("it does not add up")
        return value


WAYS: dict[str, Any] = {
    "chat": ("openai", instructor.Mode.TOOLS),
    "responses": ("openai", instructor.Mode.RESPONSES_TOOLS),
    "messages": ("anthropic", instructor.Mode.ANTHROPIC_TOOLS),
}

if __name__ == "__main__":
    provider, mode = WAYS[DIALECT]
    client = instructor.from_provider(f"{provider}/{MODEL}", mode=mode)
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": QUESTION}], "response_model": Bill}
    if DIALECT == "messages":
        asked["max_tokens"] = 500
    if STREAM:
        bill = list(client.create_partial(**asked))[-1]
    else:
        bill = client.create(**asked, max_retries=2)
    report("instructor", bill.total)
