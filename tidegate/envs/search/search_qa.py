"""The environment `search_qa`: questions of a data set, answered from a corpus."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from tidegate.envs.datasets.finite import Finite
from tidegate.envs.rewards import Grade, Reward
from tidegate.envs.search.grading import METRICS, extract, measures, well_formed
from tidegate.envs.search.judge import Judge
from tidegate.envs.search.questions import read_questions
from tidegate.errors import ConfigError
from tidegate.loading import construct, did_you_mean
from tidegate.types import Message, Task


class SearchQA(Finite):
    """Questions with gold answers, and gold documents where the data names them.

    The answer is the text in the last `<answer>` of the output. Metrics of each episode: `em`, `sub_em`,
    `f1`, `exact`, `unparseable`, and `retrieval_recall` if the gold documents are known.

    Args:
        path: Questions to train on, a `.jsonl` or `.parquet` file (see `questions.read_questions`).
        eval_path: Held-out questions.
        canary: String with which BrowseComp-Plus's files are encrypted.
        metric: Reward of an answer: `em`, `sub_em`, `f1`, `exact` or `judge`.
        judge: Options of the `Judge` for metric `judge`.
        min_matches: Least number of `<answer>` in an output; with fewer it has no answer.
        format_weight: Weight of a reward for exactly one `<answer>`, at the end; 0: no such reward.
        seed: Determines the order of training.

    Raises:
        ConfigError: An option contradicts another one, the data is missing, or a row is invalid.
    """

    name: ClassVar[str] = "search_qa"

    def __init__(
        self,
        path: str,
        eval_path: str,
        *,
        canary: str | None = None,
        metric: str = "em",
        judge: Mapping[str, Any] | None = None,
        min_matches: int = 1,
        format_weight: float = 0.0,
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
        self._judge = None if judge is None else construct(Judge, judge, "search_qa's judge")
        self.reward_limit_s = 0.0 if self._judge is None else self._judge.limit_s
        self._metric = metric
        self._min_matches = min_matches
        self.rewards = (Reward(metric, self._grade),)
        if format_weight:
            self.rewards += (Reward("format", well_formed, format_weight),)
        held_out = {"": self._read(eval_path, canary, "eval")}
        self._set_tasks(self._read(path, canary, "train"), held_out, seed)

    def gold_output(self, task: Task) -> str:
        """Returns the first gold answer in as many `<answer>` as an output must contain."""
        return f"<answer>{task.answer[0]}</answer>" * self._min_matches

    def _grade(
        self, output: str | None, answer: Sequence[str], task: Task, messages: Sequence[Message]
    ) -> Grade:
        text = extract(output, self._min_matches)
        measured = measures(text, answer, messages, task.info.get("gold", {}))
        if self._judge is None:
            return Grade(measured[self._metric], measured)
        verdict = (
            0.0 if text is None else self._judge.verdict(str(task.messages[-1]["content"]), answer, text)
        )
        return Grade(verdict, measured)

    def _read(self, path: str, canary: str | None, split: str) -> list[Task]:
        tasks = []
        for labelled in read_questions(Path(path), canary):
            messages = [{"role": "user", "content": labelled.question}]
            info = {"gold": dict(labelled.gold)} if labelled.gold else {}
            tasks.append(Task(f"{split}-{labelled.id}", self.name, messages, labelled.answers, info))
        return tasks
