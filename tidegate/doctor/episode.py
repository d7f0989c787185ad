"""Runs one episode of the agent through the gateway and an engine, and checks its result."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from tidegate.config import Settings
from tidegate.doctor.findings import Finding, error, failed, note, ok, warning
from tidegate.gateway.client import GatewayClient, SessionSummary
from tidegate.gateway.parsing.tool_calls.base import ToolCallFormat
from tidegate.gateway.parsing.tool_calls.registry import FORMATS, MARKERS, choose
from tidegate.gateway.rendering.renderer import Renderer
from tidegate.trainer.rollout.episodes import EpisodeSource
from tidegate.turn import Turn
from tidegate.types import Outcome, Task, ToolCall, Trajectory

ERROR_SHOWN = 400


@dataclass(frozen=True, slots=True)
class TrialEpisode:
    """The gateway's record of an episode."""

    reported: Outcome | None
    """Outcome that the agent's process reported; None if the agent returned."""
    summary: SessionSummary
    trajectory: Trajectory
    refusals: dict[str, int]
    """Calls that the gateway refused, by code."""
    overridden: dict[str, int]
    """Calls with a sampling parameter that had no effect, by parameter."""


async def run_episode(settings: Settings, gateway: GatewayClient, task: Task, name: str) -> TrialEpisode:
    """Has an agents' process of the gateway run an episode. Raises GatewayError."""
    trainer = settings.trainer
    sampling = settings.sampling.in_training(trainer.loss.listed_ids, trainer.routing_replay)
    before = await gateway.metrics()
    summary = await EpisodeSource.of(settings.agent, gateway).run(name, task, sampling, "train", seed=0)
    reported = await gateway.reported(summary.session_id)
    trajectory = await gateway.trajectory(summary.session_id)
    after = await gateway.metrics()
    new = [_new(before, after, name) for name in ("refusals_total", "overridden_parameters_total")]
    return TrialEpisode(reported, summary, trajectory, *new)


def _new(before: str, after: str, name: str) -> dict[str, int]:
    """Returns the increase of a gateway counter by label, without labels that did not increase."""
    old = counted(before, name)
    new = {label: number - old.get(label, 0) for label, number in counted(after, name).items()}
    return {label: number for label, number in new.items() if number}


def counted(prometheus: str, name: str) -> dict[str, int]:
    """Returns a counter with one label from the gateway's metrics."""
    return {
        next(iter(sample.labels.values())): int(sample.value)
        for family in text_string_to_metric_families(prometheus)
        for sample in family.samples
        if sample.name == f"tidegate_gateway_{name}"
    }


def judge_episode(episode: TrialEpisode, settings: Settings, renderer: Renderer) -> list[Finding]:
    """Returns the findings of one episode."""
    findings = [*_ending(episode, settings), *_refused(episode), *_overridden(episode)]
    turns = episode.trajectory.turns
    if turns:
        findings += [
            *_length(turns, settings),
            *_tool_calls(turns, settings, renderer),
            *_tools(episode.trajectory.tool_calls),
            *_branches(turns),
            *_delivery(episode),
            *_version(episode),
        ]
    if failed(findings):
        return findings
    summary = episode.summary
    reward = "no reward" if summary.reward is None else f"reward {summary.reward:g}"
    text = (
        f"one episode: {_count(len(turns), 'reply', 'replies')}, {summary.sampled_tokens} tokens, {reward}, "
        f"{summary.seconds:.1f} s"
    )
    return [*findings, ok("episode", text)]


def _ending(episode: TrialEpisode, settings: Settings) -> Iterator[Finding]:
    reported, summary = episode.reported, episode.summary
    why = (summary.error or "")[:ERROR_SHOWN].strip()
    silent = "" if episode.trajectory.turns or episode.refusals else "; it never called the gateway"
    if summary.outcome is Outcome.INFRA_ERROR:
        yield error("episode", "engine_failed", f"an engine, the worker or the environment failed: {why}")
    elif reported is Outcome.TIMEOUT and "blocked" in why:
        text = f"your agent blocked its process: {why}{silent}"
        fix = "make it a plain (not async) function, or await its slow operations"
        yield error("episode", "agent_blocked", text, fix)
    elif reported is Outcome.TIMEOUT or summary.outcome is Outcome.TIMEOUT:
        text = (
            f"your agent hung: it did not return by its deadline of {settings.agent.deadline_s:g} s{silent}"
        )
        yield error("episode", "agent_hung", text, "raise agent.deadline_s if it needs more time")
    elif reported is Outcome.CANCELLED:
        text = f"your agent exited its process: {why}{silent}"
        yield error("episode", "agent_exited", text, "an agent returns its output; it must not exit")
    elif reported is Outcome.AGENT_ERROR:
        yield error("episode", "agent_raised", f"your agent raised {why}{silent}", _hint(episode, settings))
    elif not any(turn.delivered for turn in episode.trajectory.turns) and episode.refusals:
        yield error("episode", "all_refused", f"your agent got no reply: {why}")
    elif not any(turn.delivered for turn in episode.trajectory.turns):
        text = "your agent never called the gateway, or disconnected before each reply"
        fix = "it must use session.base_url and session.api_key (a program: OPENAI_BASE_URL, OPENAI_API_KEY)"
        yield error("episode", "never_called", text, fix)
    elif summary.outcome is Outcome.REWARD_ERROR:
        yield error("episode", "reward_failed", f"the episode has no reward: {why}")
    elif episode.trajectory.output is None:
        text = "your agent returned no output: rewards receive None"
        yield warning("episode", "agent_no_output", text, "return the answer as text")


def _hint(episode: TrialEpisode, settings: Settings) -> str:
    if "context_length_exceeded" in episode.refusals:
        return "its prompt exceeds the engine's context (engine.max_context of embedded engines)"
    if "wrong_address" in episode.refusals:
        return "give its client session.base_url as it is, with /v1 (Anthropic's: without)"
    if not episode.trajectory.turns and "Connection" in (episode.summary.error or ""):
        return "it must call session.base_url, not an address of its own"
    missing = re.search("No module named '[^']+'", episode.summary.error or "")
    if missing and settings.agent.use == "command" and (python := _python(settings.agent.options)):
        return (
            f"the program's interpreter is {python}: install the package there, or name the path of another "
            "interpreter in agent.options.command"
        )
    return ""


def _python(options: Mapping[str, Any]) -> str | None:
    """Returns the path of the Python interpreter that a command runs; None if it is another program."""
    path = shutil.which(options["command"][0], path=options.get("env", {}).get("PATH"))
    return path if path and re.match("python|pypy", os.path.basename(path)) else None


def _refused(episode: TrialEpisode) -> Iterator[Finding]:
    for code, number in episode.refusals.items():
        text = f"the gateway refused {_count(number, 'call', 'calls')} of your agent: {code}"
        yield warning("episode", "calls_refused", text, "the response to the call contains the reason")


def _overridden(episode: TrialEpisode) -> Iterator[Finding]:
    if episode.overridden:
        text = (
            f"your agent's {', '.join(sorted(episode.overridden))} had no effect: training uses the settings "
            "of [sampling] and its own seeds, so that the logprobs are those of the policy"
        )
        yield note("episode", "sampling_overridden", text)


def _length(turns: list[Turn], settings: Settings) -> Iterator[Finding]:
    cut = [turn for turn in turns if turn.finish_reason == "length"]
    if not cut:
        return
    text = f"{len(cut)} of {len(turns)} replies {'was' if len(cut) == 1 else 'were'} cut by length"
    most, context = settings.sampling.max_tokens, settings.engine.context
    shortest = min(cut, key=lambda turn: len(turn.output_ids))
    size = len(shortest.output_ids)
    if size < most and (context is None or _tokens(turns, shortest) < context):
        text = (
            f"{text}, the shortest after {size} tokens: your agent's own max_tokens, for "
            f"sampling.max_tokens = {most}, {_context(settings)}"
        )
        yield warning(
            "episode", "cut_by_agent", text, "raise max_tokens in your agent's calls, or leave it out"
        )
    else:
        text = f"{text}: sampling.max_tokens = {most}, {_context(settings)}"
        yield warning("episode", "cut_by_length", text, "raise the limit that is too low")


def _tokens(turns: list[Turn], last: Turn) -> int:
    """Returns the number of tokens of a turn's prompt and reply."""
    own = len(last.delta_ids) + len(last.output_ids)
    return own if last.parent is None else own + _tokens(turns, turns[last.parent])


def _context(settings: Settings) -> str:
    context = settings.engine.context
    return "and the engine has its own limit" if context is None else f"engine.max_context = {context}"


def _tool_calls(turns: list[Turn], settings: Settings, renderer: Renderer) -> Iterator[Finding]:
    bad = [turn for turn in turns if turn.parse == "malformed"]
    if bad:
        text = renderer.decode(bad[0].output_ids.tolist())[:120]
        text = f"tool calls could not be parsed in {len(bad)} of {len(turns)} replies: {text!r}"
        fix = "a weak model has to learn the format; for a strong one, check gateway.tool_parser"
        yield warning("episode", "tool_calls_malformed", text, fix)
    texts = [renderer.decode(turn.output_ids.tolist()) for turn in turns if turn.parse is None]
    marked = [text for text in texts if any(marker in text for marker in MARKERS)]
    parser = settings.gateway.tool_parser
    formats = [*FORMATS.values()] if parser == "none" else [choose(parser, renderer.render_text).format]
    # The parser of the gateway would have read the others as text even with tools, such as a closing marker.
    unread = [text for text in marked if any(_has_calls(tool_format, text) for tool_format in formats)]
    if unread:
        none = parser == "none"
        why = "gateway.tool_parser is 'none'" if none else "your agent passed no tools with that call"
        text = f"tool calls came back as text in {len(unread)} of {len(turns)} replies: {why}"
        yield warning("episode", "tool_calls_unread", text)


def _tools(calls: Sequence[ToolCall]) -> Iterator[Finding]:
    """Judges the calls of the environment's tools."""
    if not calls or not all(call.error for call in calls):
        return
    first = f"{calls[0].name}: {calls[0].result[:ERROR_SHOWN]}"
    text = f"{_count(len(calls), 'tool call', 'tool calls')} of your agent failed and none succeeded; {first}"
    fix = "a model that does not know the tools learns them first: tidegate sft"
    yield warning("episode", "tools_failed", text, fix)


def _has_calls(tool_format: ToolCallFormat, text: str) -> bool:
    """Returns whether a text has a call in a format, also a malformed one."""
    parser = tool_format.parser(())
    parser.feed(text)
    parser.finish()
    return parser.status is not None


def _branches(turns: list[Turn]) -> Iterator[Finding]:
    branches = [turn for turn in turns[1:] if turn.branch is not None]
    if not branches:
        return
    reason = branches[-1].branch or ""
    reworded = reason.partition(":")[0] in ("edited", "template")
    if len(branches) == len(turns) - 1 and reworded:
        text = (
            "your agent rewrites the history, so every turn is a "
            f"branch ({reason}), trained as a separate sequence"
        )
        fix = "send past replies back unchanged: message.model_dump(exclude_none=True)"
        yield warning("episode", "every_turn_branches", text, fix)
    else:
        text = f"{len(branches)} of {len(turns)} turns are branches, the last one: {reason}"
        yield note("episode", "branches", text)


def _delivery(episode: TrialEpisode) -> Iterator[Finding]:
    lost = sum(not turn.delivered for turn in episode.trajectory.turns)
    if lost and episode.reported is None:
        text = (
            f"your agent did not wait for {_count(lost, 'reply', 'replies')}; "
            "undelivered replies are not trained on"
        )
        yield warning("episode", "undelivered", text)


def _version(episode: TrialEpisode) -> Iterator[Finding]:
    trainable = list(episode.trajectory.trainable_turns())
    if trainable and episode.trajectory.oldest_version() is None:
        text = "the engine reported no version for some tokens, so they cannot be trained on"
        yield error("episode", "version_unknown", text)


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"
