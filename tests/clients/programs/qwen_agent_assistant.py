"""A Qwen-Agent Assistant: `chat` (tools of the API) or `text` (it writes tools into the system prompt)."""

from __future__ import annotations

import os
from typing import Any, ClassVar

import solving
from calculator import MODEL, PARAMETERS
from qwen_agent.agents import Assistant
from qwen_agent.tools.base import BaseTool
from solving import DIALECT, INSTRUCTIONS, QUESTION, STREAM, report


class Calculator(BaseTool):
    name = "calculator"
    description = "Works out an expression."
    parameters: ClassVar = {key: PARAMETERS[key] for key in ("type", "properties", "required")}

    def call(self, params: str | dict[str, Any], **_: Any) -> str:
        return solving.calculator(self._verify_json_format_args(params)["expression"])


if __name__ == "__main__":
    llm = {
        "model": MODEL,
        "model_type": "oai",
        "model_server": os.environ["OPENAI_BASE_URL"],
        "generate_cfg": {"use_raw_api": DIALECT == "chat"},
    }
    agent = Assistant(llm=llm, function_list=[Calculator()], system_message=INSTRUCTIONS)
    messages = [{"role": "user", "content": QUESTION}]
    if STREAM:
        *_, reply = agent.run(messages)
    else:
        reply = agent.run_nonstream(messages)
    report("qwen-agent", reply[-1]["content"])
