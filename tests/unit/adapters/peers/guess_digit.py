"""A multi-turn environment of verifiers: a digit is to be guessed by hints."""

from __future__ import annotations

import random

import verifiers as vf
from datasets import Dataset


class GuessDigit(vf.MultiTurnEnv):
    """Answers each guess with `higher` or `lower`; the rollout ends with the right guess."""

    async def env_response(self, messages: list, state: vf.State, **kwargs: object) -> list:
        guess = messages[-1]["content"].strip()
        if guess == state["answer"]:
            state["final_env_response"] = [{"role": "user", "content": "right"}]
            return state["final_env_response"]
        hint = "higher" if guess < state["answer"] else "lower"
        return [{"role": "user", "content": hint}]


def load_environment(rows: int = 300, seed: int = 0) -> vf.Environment:
    generator = random.Random(seed)
    table = [{"question": f"game {n}", "answer": str(generator.randrange(10))} for n in range(rows)]

    def guessed(state: vf.State) -> float:
        return float(state.get("final_env_response") is not None) / len(state["trajectory"])

    return GuessDigit(max_turns=4, dataset=Dataset.from_list(table), rubric=vf.Rubric(funcs=[guessed]))
