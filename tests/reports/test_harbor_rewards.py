"""Reward files of Harbor's tasks: which number counts, and which files are errors."""

from __future__ import annotations

import pytest

from tidegate.envs.rewards import Grade
from tidegate.envs.shell.harbor import graded
from tidegate.errors import RewardError

DETAILS = '{"reward": 1.0, "resolved": true, "regressions": [], "parse_status": "ok", "runner": "pytest"}'


@pytest.mark.parametrize(
    ("text", "reward", "metrics"),
    [
        ("0.5\n", 0.5, {}),
        *((text, value, {}) for text, value in ((".50", 0.5), ("1.", 1.0), ("+1\n", 1.0), ("01", 1.0))),
        *((text, value, {}) for text, value in (("1e-1", 0.1), ("-1", -1.0), (" \n 0 \n", 0.0))),
        (DETAILS, 1.0, {"resolved": 1.0}),
        ('{"reward": 1, "style": 0.5}', 1.0, {"style": 0.5}),
        ('{"reward": 1, "note": "all pass", "time": null, "tests": ["a"], "d": {"passed": 3}}', 1.0, {}),
        ('{"reward": 0.5, "seconds": 12}\x001', 0.5, {"seconds": 12.0}),
        ('{"reward": 0}\x001', 0.0, {}),
        ('{"passed": 3, "total": 4}\x000.75', 0.75, {"passed": 3.0, "total": 4.0}),
        ('{"tests": [{"name": "a", "status": "passed"}]}\x001\n', 1.0, {}),
        ('{"reward": null, "a": 0.25}\x001', 1.0, {"a": 0.25}),
        ('{"reward": "pass"}\x00.50\n', 0.5, {}),
        ("\x001\n\0log", 1.0, {}),
        ("not json\x001", 1.0, {}),
        ('{"style": 0.5, "speed": 1}', 0.75, {"style": 0.5, "speed": 1.0}),
        ('{"score": 7, "note": "x"}', 7.0, {"score": 7.0}),
    ],
)
def test_the_number_that_harbor_reads_counts(text: str, reward: float, metrics: dict[str, float]) -> None:
    """huggingface/Repo2RLEnv#74, Mosi-AI/LiveClawBench#3, PrimeIntellect-ai/verifiers#1674, #2067, #2152,
    #2224, hud-evals/hud-python#516."""
    assert graded(text) == Grade(reward, {"without_reward": 0.0, **metrics})


@pytest.mark.parametrize(
    "text",
    [
        "", "\0\0", "yes", "nan", "inf", "-inf", "{}", "[1]", "1 2", "0,5", "1/2", "1\n2", "null", '"1"',
        '{"reward": "x"}', '{"reward": [1]}', '{"reward": NaN}', '{"reward": Infinity}', '{"reward": null}',
        '{"note": "x"}', '{"passed": 3, "total": 4}', '{"reward": 1e999}', f'{{"reward": 1{"0" * 400}}}',
        "true", "\0error: no metrics.json\n", "{" * 100_000,
    ],
)  # fmt: skip
def test_a_file_without_one_finite_number_is_an_error(text: str) -> None:
    """aisa-group/PostTrainBench#68, morluto/jacobian#727, #831, PrimeIntellect-ai/verifiers#1674."""
    with pytest.raises(RewardError, match=r"test\.sh wrote no reward.*write one finite number"):
        graded(text)


def test_a_key_that_occurs_twice_is_an_error() -> None:
    """Readers of JSON differ in the value that they keep."""
    for text in ('{"reward": 0, "reward": 1}', '{"reward": 1, "d": {"a": 1, "a": 2}}\x001'):
        with pytest.raises(RewardError, match=r"reward\.json: the key '(reward|a)' occurs twice; write each"):
            graded(text)
