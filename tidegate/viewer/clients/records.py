"""Folds `clients.jsonl`: rewards by project key and version, feedback by name, and what was not accepted."""

from __future__ import annotations

import re
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from tidegate.viewer.clients.running_mean import RunningMean
from tidegate.viewer.formatting import as_mapping, known, mappings, printable

TAKEN, REFUSED = "taken", "refused"
MOST_NAMES = 200
"""Limit of the names of rewards that are counted apart; clients choose them."""
OTHER = "(other names)"
_NUMBERS = re.compile(r"\d[\d.,]*\d|\d")


@dataclass(slots=True)
class NamedReward:
    """The values of one reward, and the seconds between a reply and each that was posted as feedback."""

    values: RunningMean = field(default_factory=RunningMean)
    delays: array[float] = field(default_factory=lambda: array("d"))


@dataclass(slots=True)
class ClientRecords:
    """Totals of the lines read so far. Invalid lines and values are left out."""

    groups: dict[str, tuple[str, str]] = field(default_factory=dict)
    """By id: the project key, and `taken`, `refused` or the outcome of a conversation without a reward."""
    rewards: dict[str, RunningMean] = field(default_factory=dict)
    """By project key: the rewards of episodes, accepted or refused."""
    versions: dict[int, RunningMean] = field(default_factory=dict)
    """By version: the rewards of episodes whose tokens are all of this version."""
    mixed: RunningMean = field(default_factory=RunningMean)
    """The rewards of episodes with tokens of several versions."""
    named: dict[str, NamedReward] = field(default_factory=dict)
    """By name of the reward."""
    refusals: Counter[str] = field(default_factory=Counter)
    """By reason, whose numbers are replaced."""
    noted: list[str] = field(default_factory=list)
    """Groups with comments or corrections, in the order in which they came."""
    comments: int = 0
    _: KW_ONLY
    corrections: int = 0

    def read(self, lines: Iterable[Mapping[str, Any]]) -> None:
        for line in lines:
            self.add(line)

    def add(self, line: Mapping[str, Any]) -> None:
        """Counts a line; of a group that was counted before, only its end."""
        group, client, state = (line.get(name) for name in ("group", "client", "state"))
        if not (isinstance(group, str) and isinstance(client, str) and isinstance(state, str)):
            return
        earlier = self.groups.get(group)
        self.groups[group] = client, state
        if state == REFUSED and (earlier is None or earlier[1] != REFUSED):
            self.refusals[_NUMBERS.sub("…", printable(line.get("why") or "unknown"))] += 1
        if earlier is not None:
            return
        for episode in mappings(line.get("episodes")):
            self._add_episode(client, episode)
            if self._add_notes(episode) and self.noted[-1:] != [group]:
                self.noted.append(group)

    def _add_episode(self, client: str, episode: Mapping[str, Any]) -> None:
        reward = known(episode.get("reward"))
        if reward is not None:
            self.rewards.setdefault(client, RunningMean()).add(reward)
            oldest, newest = episode.get("oldest"), episode.get("newest")
            if oldest == newest and isinstance(oldest, int):
                self.versions.setdefault(oldest, RunningMean()).add(reward)
            else:
                self.mixed.add(reward)
        feedback = mappings(episode.get("feedback"))
        given = [one.get("name") for one in feedback]
        for one in feedback:
            self._add_value(one.get("name"), one.get("value"), one.get("after_s"))
        for name, value in as_mapping(episode.get("parts")).items():
            if name not in given:  # it is of a reward function, or posted without a time
                self._add_value(name, value, None)

    def _add_value(self, name: object, value: object, after_s: object) -> None:
        number, delay = known(value), known(after_s)
        if number is None or not isinstance(name, str):
            return
        if name not in self.named and len(self.named) >= MOST_NAMES:
            name = OTHER
        reward = self.named.setdefault(name, NamedReward())
        reward.values.add(number)
        if delay is not None:
            reward.delays.append(delay)

    def _add_notes(self, episode: Mapping[str, Any]) -> bool:
        comments, corrections = (int(known(episode.get(kind)) or 0) for kind in ("comments", "corrections"))
        self.comments += comments
        self.corrections += corrections
        return bool(comments or corrections)
