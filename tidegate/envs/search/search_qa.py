"""The environment `search_qa`: questions about a synthetic world or of a data set, answered from a corpus."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any, ClassVar

from tidegate.envs.datasets.finite import Finite
from tidegate.envs.rewards import Grade, Reward
from tidegate.envs.search.grading import METRICS, extract, recall, well_formed
from tidegate.envs.search.judge import Judge
from tidegate.envs.search.questions import read_questions
from tidegate.envs.search.synthetic_world import SyntheticWorld, WorldQuestion, make_world
from tidegate.errors import ConfigError
from tidegate.loading import construct, did_you_mean
from tidegate.types import Message, Task


class SearchQA(Finite):
    """Questions with gold answers, and gold documents where the data names them.

    The answer is the text in the last `<answer>` of the output. Metrics of each episode: `em`, `sub_em`,
    `f1`, `exact`, `unparseable`, and `retrieval_recall` if the gold documents are known.

    Args:
        path: Questions to train on, a `.jsonl` or `.parquet` file (see `questions.read_questions`). None: a
            synthetic world; the held-out questions are about another world that shares no entity with it,
            with two hops ("") and three (`three_hops`).
        eval_path: Held-out questions.
        canary: String with which BrowseComp-Plus's files are encrypted.
        metric: Reward of an answer: `em`, `sub_em`, `f1`, `exact` or `judge`.
        judge: Options of the `Judge` for metric `judge`.
        min_matches: Least number of `<answer>` in an output; with fewer it has no answer.
        format_weight: Weight of a reward for exactly one `<answer>`, at the end; 0: no such reward.
        hops: Facts (1 to 3) that lead to the answer of a training question of the synthetic world.
        seed: Determines the synthetic world and the order of training.

    Raises:
        ConfigError: An option contradicts another one, the data is missing, or a row is invalid.
    """

    name: ClassVar[str] = "search_qa"

    def __init__(
        self,
        path: str | None = None,
        eval_path: str | None = None,
        *,
        canary: str | None = None,
        metric: str = "em",
        judge: Mapping[str, Any] | None = None,
        min_matches: int = 1,
        format_weight: float = 0.0,
        hops: int = 2,
        seed: int = 0,
    ) -> None:
        if metric != "judge" and metric not in METRICS:
            metrics = (*METRICS, "judge")
            raise ConfigError(
                f"search_qa: there is no metric {metric!r}{did_you_mean(metric, metrics)}; "
                f"there are {', '.join(metrics)}"
            )
        if (metric == "judge") != (judge is not None):
            raise ConfigError("search_qa: metric = 'judge' and the judge's options must be set together")
        if (path is None) != (eval_path is None):
            raise ConfigError(
                "search_qa: path and eval_path must be set together; without both, questions are about a "
                "synthetic world"
            )
        if canary is not None and path is None:
            raise ConfigError("search_qa: canary applies to files of BrowseComp-Plus, but path is not set")
        self._judge = None if judge is None else construct(Judge, judge, "search_qa's judge")
        self.reward_limit_s = 0.0 if self._judge is None else self._judge.limit_s
        self._metric = metric
        self._min_matches = min_matches
        self.rewards = (Reward(metric, self._grade),)
        if format_weight:
            self.rewards += (Reward("format", well_formed, format_weight),)
        if path is not None and eval_path is not None:
            train = self._read(path, canary, "train")
            held_out = {"": self._read(eval_path, canary, "eval")}
        else:
            train = self._of_world(make_world(seed, "train"), hops, seed)
            unseen = make_world(seed, "held_out")
            held_out = {"": self._of_world(unseen, 2, seed), "three_hops": self._of_world(unseen, 3, seed)}
        self._set_tasks(train, held_out, seed)

    def gold_output(self, task: Task) -> str:
        """Returns the first gold answer in as many `<answer>` as an output must contain."""
        return f"<answer>{task.answer[0]}</answer>" * self._min_matches

    def _grade(
        self, output: str | None, answer: Sequence[str], task: Task, messages: Sequence[Message]
    ) -> Grade:
        text = extract(output, self._min_matches)
        values = {name: 0.0 if text is None else grade(text, answer) for name, grade in METRICS.items()}
        metrics = {**values, "unparseable": float(text is None)}
        gold = task.info.get("gold")
        if gold:
            metrics["retrieval_recall"] = recall(messages, gold)
        if self._judge is None:
            return Grade(values[self._metric], metrics)
        verdict = (
            0.0 if text is None else self._judge.verdict(str(task.messages[-1]["content"]), answer, text)
        )
        return Grade(verdict, metrics)

    def _read(self, path: str, canary: str | None, split: str) -> list[Task]:
        return [
            self._task(f"{split}-{labelled.id}", labelled.question, labelled.answers, labelled.gold)
            for labelled in read_questions(Path(path), canary)
        ]

    def _of_world(self, world: SyntheticWorld, hops: int, seed: int) -> list[Task]:
        """Returns the world's questions, shuffled so that the first ones are of all kinds."""
        questions = list(world.questions(hops))
        if not questions:
            raise ConfigError(f"search_qa: hops = {hops}; the synthetic world has questions of 1 to 3")
        Random(f"search_qa/{seed}").shuffle(questions)
        return [self._about(question, number) for number, question in enumerate(questions)]

    def _about(self, question: WorldQuestion, number: int) -> Task:
        gold = {fact.id: fact.text for fact in question.facts}
        split = question.facts[0].id.rpartition("-")[0]
        return self._task(f"{split}-{question.hops}-{number}", question.text, [question.answer], gold)

    def _task(self, id: str, question: str, answers: Sequence[str], gold: Mapping[str, str]) -> Task:
        messages = [{"role": "user", "content": question}]
        return Task(id, self.name, messages, list(answers), {"gold": dict(gold)} if gold else {})
