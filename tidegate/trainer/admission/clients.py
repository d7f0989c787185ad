"""Groups that clients form: why one is refused, and the share of a batch that one client may have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from tidegate.trainer.admission.rules import Rules
from tidegate.trainer.admission.state import GroupState
from tidegate.types import Group


def refusal_reason(group: Group, rules: Rules, version: int, waiting: int, *, admissible: bool) -> str | None:
    """Return why a client's group is refused, None if it is accepted.

    Args:
        group: The group.
        rules: The run's rules.
        version: The version that is live.
        waiting: Number of the client's accepted groups that no batch has taken yet.
        admissible: Whether the staleness bound admits the group's tokens.
    """
    number, newest = len(group.trajectories), group.newest_version()
    if not rules.min_group_size <= number <= rules.group_size:
        sizes = dict.fromkeys((rules.min_group_size, rules.group_size))
        return f"it has {number} episodes, and the run takes {' to '.join(map(str, sizes))}"
    if newest is not None and newest > version:
        return f"it has tokens of version {newest}, which this run has not published"
    if not admissible:
        return (
            f"stale: its oldest token is of version {group.oldest_version()}, the trainer is at version "
            f"{version}, and the staleness bound is {rules.max_staleness}"
        )
    if rules.client_share < 1 and waiting >= rules.client_capacity:
        return (
            f"{waiting} groups of {group.client} wait, and trainer.max_client_share = {rules.client_share:g} "
            f"admits {rules.client_limit(rules.groups_per_batch)} to a batch"
        )
    return None


def choose(order: Iterable[str], groups: Mapping[str, GroupState], size: int, limit: int) -> list[str]:
    """Return the first `size` groups in `order` with at most `limit` of any one client; fewer if need be."""
    chosen: list[str] = []
    taken: Counter[str] = Counter()
    for group_id in order:
        client = groups[group_id].client
        if len(chosen) == size:
            break
        if client is not None and taken[client] >= limit:
            continue
        if client is not None:
            taken[client] += 1
        chosen.append(group_id)
    return chosen
