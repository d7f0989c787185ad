"""Word problems for two: each proposal and each verdict is rewarded by itself, the choice for both."""

import json
from fractions import Fraction

from tidegate.agents.calculator import calculate
from tidegate.envs.arithmetic import Arithmetic
from tidegate.envs.rewards import Grade, Reward


def is_right(expression, answer):
    """Whether an expression has the value after `####`."""
    try:
        return Fraction(calculate(expression or "")) == Fraction(answer.rpartition("####")[2].strip())
    except (ValueError, ZeroDivisionError):
        return False


def parts(output, answer):
    """Number of the chosen proposal, whether each proposal is right, and whether each verdict is."""
    try:
        episode = json.loads(output or "")
    except ValueError:
        return 0, [False], [False]
    right = [is_right(one, answer) for one in episode["proposals"]]
    judged = [(said == "yes") == was for said, was in zip(episode["verdicts"], right, strict=True)]
    return episode["chosen"], right, judged


def chosen(output, answer):
    """1 if the chosen proposal is right."""
    number, right, judged = parts(output, answer)
    alone, accuracy = sum(right) / len(right), sum(judged) / len(judged)
    return Grade(float(right[number]), {"solver_alone": alone, "verifier_accuracy": accuracy})


class Duo(Arithmetic):
    """The problems of `arithmetic`, answered by an expression."""

    rewards = (Reward("chosen", chosen),)

    def gold_output(self, task):
        """The output of a right proposal that is believed."""
        expression = task.answer.partition(" = ")[0]
        return json.dumps({"chosen": 0, "proposals": [expression], "verdicts": ["yes"]})

    def turn_rewards(self, task, trajectory):
        """A proposal's turn has 1 if it is right, a verdict's turn if the verdict is."""
        _, right, judged = parts(trajectory.output, task.answer)
        found = {}
        for policy, values in (("solver", right), ("verifier", judged)):
            turns = [turn.index for turn in trajectory.delivered_turns() if turn.policy == policy]
            found |= dict(
                zip(turns, map(float, values), strict=False)
            )  # nothing of an output of another form
        return found
