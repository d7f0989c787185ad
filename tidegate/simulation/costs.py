"""CPU seconds per event of the components that are single processes: by default those of one machine."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from tidegate.settings.sections import SettingsSection

MEASURED_ON = "2026-11-26"
Cost = Annotated[float, Field(ge=0)]


class Costs(SettingsSection):
    """Costs of one machine; `_s` in CPU seconds of one core, `_bytes` in bytes. The defaults were measured on
    two cores of an AMD EPYC."""

    gateway_turn_s: Cost = 0.00101
    """A turn, without the cost of its tokens."""
    gateway_streamed_turn_s: Cost = 0.00085
    gateway_token_s: Cost = 1.25e-06
    """A sampled token of a turn."""
    gateway_streamed_token_s: Cost = 7.56e-06
    gateway_prompt_token_s: Cost = 4.26e-06
    """A new token of a turn's prompt."""
    gateway_session_s: Cost = 0.00248
    """A session's opening and finishing."""
    gateway_group_s: Cost = 0.00303
    """A group's sealing, lease and acknowledgement, without the cost of its tokens."""
    gateway_group_token_s: Cost = 1.71e-07
    gateway_probe_s: Cost = 0.00078
    """A probe of an engine's health."""
    gateway_poll_s: Cost = 0.000411
    """A worker's poll."""
    router_session_s: Cost = 0.00285
    """As `gateway_session_s`, in the process of the shards' router; so with the next three."""
    router_group_s: Cost = 0.00356
    router_group_token_s: Cost = 0.0
    router_poll_s: Cost = 0.00149
    trainer_session_s: Cost = 0.00155
    """The trainer's calls for a session."""
    trainer_group_s: Cost = 0.00142
    """The trainer's calls for a group."""
    trainer_group_token_s: Cost = 6.84e-08
    admission_group_s: Cost = 2.13e-05
    admission_attempt_s: Cost = 2.32e-05
    ledger_entry_s: Cost = 1.19e-05
    rows_token_s: Cost = 8.35e-07
    """A token of a batch that is laid out into rows."""
    trajectory_token_s: Cost = 4.06e-07
    trajectory_token_bytes: Cost = 15.9
    metrics_token_s: Cost = 4.16e-07
    metrics_line_s: Cost = 0.00277
    publish_full_byte_s: Cost = 1.28e-09
    """A byte of a version that is written with all weights."""
    publish_difference_byte_s: Cost = 3.28e-09
    """A byte of a version's weights whose difference from the last version is written."""
    difference_share: Annotated[float, Field(ge=0, le=1)] = 0.0299
    """Bytes of a difference ÷ bytes of all weights."""
    broadcast_gather_byte_s: Cost = 2.26e-09
    """A byte of weights that is gathered for sending."""
    broadcast_byte_s: Cost = 1.2e-09
    """A byte of weights that is sent to one engine."""
    broadcast_difference_byte_s: Cost = 1.01e-09
    """A byte of a difference that is sent to one engine."""
    journal_turn_bytes: Cost = 666.0
    journal_token_bytes: Cost = 12.8
