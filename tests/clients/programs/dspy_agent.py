"""A DSPy ReAct module: `chat` or `responses`."""

from __future__ import annotations

import dspy
from calculator import MODEL
from solving import DIALECT, INSTRUCTIONS, QUESTION, calculator, report

if __name__ == "__main__":
    lm = dspy.LM(
        f"openai/{MODEL}",
        model_type="responses" if DIALECT == "responses" else "chat",
        cache=False,
        temperature=1.0,
        max_tokens=1000,
    )
    with dspy.context(lm=lm):
        solver = dspy.ReAct(
            dspy.Signature("question -> answer", INSTRUCTIONS), tools=[calculator], max_iters=5
        )
        report("dspy", solver(question=QUESTION).answer)
