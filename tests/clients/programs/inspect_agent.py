"""Inspect's `react` agent in an evaluation: `chat`, `responses`, `messages`, `compatible` (`openai-api`)."""

from __future__ import annotations

import os

import solving
from calculator import MODEL
from inspect_ai import Task, eval
from inspect_ai.agent import react
from inspect_ai.dataset import Sample
from inspect_ai.model import GenerateConfig, Model, get_model
from inspect_ai.tool import Tool, tool
from solving import DIALECT, INSTRUCTIONS, QUESTION, STREAM, report


@tool
def calculator() -> Tool:
    async def execute(expression: str) -> str:
        """Works out an expression.

        Args:
            expression: Numbers, + - * / and parentheses.
        """
        return solving.calculator(expression)

    return execute


def model() -> Model:
    """Without `reasoning_summary`, Inspect begins with a call that finds out whether there are summaries."""
    if DIALECT == "messages":
        return get_model(f"anthropic/{MODEL}", config=GenerateConfig(max_tokens=1000), streaming=STREAM)
    if DIALECT == "compatible":
        access = {"base_url": os.environ["OPENAI_BASE_URL"], "api_key": os.environ["OPENAI_API_KEY"]}
        return get_model(f"openai-api/tidegate/{MODEL}", stream=STREAM, **access)
    config = GenerateConfig(reasoning_summary="none")
    return get_model(f"openai/{MODEL}", config=config, responses_api=DIALECT == "responses", streaming=STREAM)


if __name__ == "__main__":
    agent = react(prompt=INSTRUCTIONS, tools=[calculator()], submit=False)
    task = Task([Sample(QUESTION)], solver=agent)
    [log] = eval(task, model=model(), display="none", log_dir="logs", max_retries=0)
    assert log.samples, log.error
    report("inspect-ai", log.samples[0].output.completion)
