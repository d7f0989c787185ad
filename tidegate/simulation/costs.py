"""CPU seconds per event of the components that are single processes, as they were measured on one machine."""

from __future__ import annotations

import difflib
import json
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from tidegate.errors import ConfigError
from tidegate.settings.sections import SettingsSection

Cost = Annotated[float, Field(ge=0, allow_inf_nan=False)]
ROW = ("cost", "value", "fills_a_core_at")
"""Keys of a measured cost in a file of costs."""


class Costs(SettingsSection):
    """Costs of one machine; `_s` in CPU seconds of one core, `_bytes` in bytes."""

    gateway_turn_s: Cost
    """A turn, without the cost of its tokens."""
    gateway_streamed_turn_s: Cost
    gateway_token_s: Cost
    """A sampled token of a turn."""
    gateway_streamed_token_s: Cost
    gateway_prompt_token_s: Cost
    """A new token of a turn's prompt."""
    gateway_session_s: Cost
    """A session's opening and finishing."""
    gateway_group_s: Cost
    """A group's sealing, lease and acknowledgement, without the cost of its tokens."""
    gateway_group_token_s: Cost
    gateway_probe_s: Cost
    """A probe of an engine's health."""
    gateway_poll_s: Cost
    """A worker's poll."""
    router_session_s: Cost
    """As `gateway_session_s`, in the process of the shards' router; so with the next three."""
    router_group_s: Cost
    router_group_token_s: Cost
    router_poll_s: Cost
    trainer_session_s: Cost
    """The trainer's calls for a session."""
    trainer_group_s: Cost
    """The trainer's calls for a group."""
    trainer_group_token_s: Cost
    admission_group_s: Cost
    admission_attempt_s: Cost
    ledger_entry_s: Cost
    rows_token_s: Cost
    """A token of a batch that is laid out into rows."""
    trajectory_token_s: Cost
    trajectory_token_bytes: Cost
    metrics_token_s: Cost
    metrics_line_s: Cost
    publish_full_byte_s: Cost
    """A byte of a version that is written with all weights."""
    publish_difference_byte_s: Cost
    """A byte of a version's weights whose difference from the last version is written."""
    difference_share: Annotated[float, Field(ge=0, le=1)]
    """Bytes of a difference ÷ bytes of all weights."""
    broadcast_gather_byte_s: Cost
    """A byte of weights that is gathered for sending."""
    broadcast_byte_s: Cost
    """A byte of weights that is sent to one engine."""
    broadcast_difference_byte_s: Cost
    """A byte of a difference that is sent to one engine."""
    journal_turn_bytes: Cost
    journal_token_bytes: Cost


MEASURED_ON = "2026-11-26"
MEASURED = Costs(
    gateway_turn_s=0.00101,
    gateway_streamed_turn_s=0.00085,
    gateway_token_s=1.25e-06,
    gateway_streamed_token_s=7.56e-06,
    gateway_prompt_token_s=4.26e-06,
    gateway_session_s=0.00248,
    gateway_group_s=0.00303,
    gateway_group_token_s=1.71e-07,
    gateway_probe_s=0.00078,
    gateway_poll_s=0.000411,
    router_session_s=0.00285,
    router_group_s=0.00356,
    router_group_token_s=0.0,
    router_poll_s=0.00149,
    trainer_session_s=0.00155,
    trainer_group_s=0.00142,
    trainer_group_token_s=6.84e-08,
    admission_group_s=2.13e-05,
    admission_attempt_s=2.32e-05,
    ledger_entry_s=1.19e-05,
    rows_token_s=8.35e-07,
    trajectory_token_s=4.06e-07,
    trajectory_token_bytes=15.9,
    metrics_token_s=4.16e-07,
    metrics_line_s=0.00277,
    publish_full_byte_s=1.28e-09,
    publish_difference_byte_s=3.28e-09,
    difference_share=0.0299,
    broadcast_gather_byte_s=2.26e-09,
    broadcast_byte_s=1.2e-09,
    broadcast_difference_byte_s=1.01e-09,
    journal_turn_bytes=666.0,
    journal_token_bytes=12.8,
)
"""Costs on two cores of an AMD EPYC, measured on 2026-11-26."""


def read_costs(path: Path) -> Costs:
    """Reads `{"results": [{"cost", "value"}, ...]}`, with or without lines before the JSON object.

    Raises:
        ConfigError: The file cannot be read, or a cost is unknown, missing, repeated or not a number.
    """
    costs: dict[str, Any] = {}
    for row in _rows(path):
        if row["cost"] in costs:
            raise ConfigError(f"--costs {path}: the cost {row['cost']!r} is given twice")
        costs[row["cost"]] = row["value"]
    if unknown := costs.keys() - Costs.model_fields.keys():
        raise ConfigError(f"--costs {path}: there is no cost {_named(sorted(unknown)[0])}")
    if missing := Costs.model_fields.keys() - costs.keys():
        raise ConfigError(
            f"--costs {path}: these costs are missing: {', '.join(sorted(missing))}; docs/simulate.md says "
            "how to measure them"
        )
    try:
        return Costs.model_validate(costs, strict=True)
    except ValidationError as error:
        wrong = error.errors()[0]
        raise ConfigError(f"--costs {path}: {wrong['loc'][0]} = {wrong['input']!r}: {wrong['msg']}") from None


def _rows(path: Path) -> list[dict[str, Any]]:
    """Returns the measured costs, each with `cost` and `value`."""
    try:
        lines = path.read_text(encoding="utf-8").strip()
        found = json.loads(lines if lines.startswith("{") else lines.rpartition("\n")[2])
    except OSError as error:
        raise ConfigError(f"--costs {path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"--costs {path}: no JSON object of costs (docs/simulate.md): {error}") from None
    keys = {"machine", "results", "checks"}
    if not isinstance(found, dict) or not isinstance(found.get("results"), list):
        raise ConfigError(f"--costs {path}: no JSON object of costs (docs/simulate.md): no 'results'")
    if unknown := found.keys() - keys:
        raise ConfigError(f"--costs {path}: there is no key {sorted(unknown)[0]!r}; known: {', '.join(keys)}")
    for row in found["results"]:
        if not isinstance(row, dict) or not {"cost", "value"} <= row.keys() <= {*ROW}:
            raise ConfigError(f"--costs {path}: {row!r} has other keys than {', '.join(ROW)}")
    return list(found["results"])


def _named(name: str) -> str:
    close = difflib.get_close_matches(name, Costs.model_fields, n=1)
    return f"{name!r}" + (f"; did you mean {close[0]!r}?" if close else "")
