"""Token sampling with one uniform number per (seed, position), so that neither the batch nor a retraction
changes the tokens of a request."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tidegate.engine.requests.params import SamplingParams
from tidegate.engine.scheduling.slots import Slots
from tidegate.settings.servers import GREEDY_BELOW
from tidegate.types import LISTED

LEAST_LOGPROB = -9999.0
"""Logprob of listed ids that have no probability, as in vLLM: JSON has no infinity."""


def uniforms(seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    """Returns counter-based uniforms in [0, 1) for output positions; all arrays have shape [n].

    Applies splitmix64 (Steele, Lea, Flood 2014) to the seed and again to seed and position. The uniforms have
    52 bits, so that u·total < total for every float64 total.
    """
    with np.errstate(over="ignore"):
        mixed = _mix(_mix(seeds) + positions * np.uint64(0x9E3779B97F4A7C15))
    return (mixed >> np.uint64(12)).astype(np.float64) * 2.0**-52


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def sample(logits_bv: Tensor, slots: Slots) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Samples one token for each row; returns (ids, logprobs), both [rows].

    Sets `Slots.top` and `Slots.kept`, if requested.

    The order is SGLang's: penalties and grammar change the logits, the temperature divides them, then top-k,
    top-p (of the ids left by top-k) and min-p (relative to the likeliest id) exclude ids. The log-probability
    is log-softmax(logits ÷ temperature) after penalties and grammar and before top-k, top-p and min-p, as in
    SGLang. With temperature 0 the logits are not divided.
    """
    n = slots.count
    greedy = slots.temperatures[:n] < GREEDY_BELOW
    scale = upload(np.where(greedy, np.float32(1), slots.temperatures[:n]), logits_bv.device)
    logits_bv = logits_bv.float()
    if slots.has_processors[:n].any():
        process_logits(logits_bv, slots)
    logprobs_bv = torch.log_softmax(logits_bv / scale[:, None], dim=-1)
    uniform = upload(uniforms(slots.seeds[:n], slots.output_counts[:n]), logits_bv.device)
    ids = _inverse_cdf(logprobs_bv, uniform)
    top = (slots.top_ps[:n] < 1) | (slots.top_ks[:n] > 0) | (slots.min_ps[:n] > 0)
    narrowed = np.flatnonzero(~greedy & top)
    if len(narrowed):
        rows, top_ps, top_ks, min_ps = (
            upload(array, logits_bv.device)
            for array in (narrowed, slots.top_ps[narrowed], slots.top_ks[narrowed], slots.min_ps[narrowed])
        )
        ids[rows], ordered, allowed = _draw_from_top(logprobs_bv[rows], uniform[rows], top_ps, top_ks, min_ps)
    if greedy.any():
        ids = torch.where(upload(greedy, ids.device), logprobs_bv.argmax(-1), ids)
    found = [ids[:, None], logprobs_bv.gather(-1, ids[:, None])]
    if listed := int(slots.listed[:n].max(initial=0)):
        best = torch.topk(logprobs_bv, listed)
        found += [best.indices, best.values.clamp(min=LEAST_LOGPROB)]
    # One copy for all, since it is the only wait for the device in a step; float64 is exact for ids.
    both = torch.cat([part.double() for part in found], dim=1).cpu().numpy()
    if listed:
        # A new array for each step: requests keep their rows of it until they end.
        slots.top = np.empty((n, listed), LISTED)
        slots.top["id"], slots.top["logprob"] = both[:, 2 : 2 + listed], both[:, 2 + listed :]
    if slots.masked[narrowed].any():  # a further wait for the device: the kept ids vary in number
        counts, masses = (allowed > 0).sum(-1), allowed.sum(-1).log()
        ends, logs = torch.stack([counts.double(), masses]).cpu().numpy()
        rows_of_ids = ordered[:, : int(ends.max())].cpu().numpy()
        slots.kept = {
            int(row): (float(both[row, 1] - log), of_row[: int(end)].tolist())
            for row, end, log, of_row in zip(narrowed, ends, logs, rows_of_ids, strict=True)
            if slots.masked[row]
        }
    return both[:, 0].astype(np.int64), both[:, 1].copy()


def process_logits(logits_bv: Tensor, slots: Slots) -> None:
    """Applies penalties, then grammars, as in SGLang: changes logits in place.

    Sets `Slots.choices` to the number of ids that each row's grammar allows and `Slots.masses` to their total
    probability. Ids that the grammar excludes get −∞.
    """
    for row in np.flatnonzero(slots.has_processors[: slots.count]):
        owner = slots.owners[row]
        if owner.params.penalised:
            penalise(logits_bv[row], owner.output_ids, owner.params)
        if owner.grammar is not None:
            allowed = owner.grammar.allowed(logits_bv.shape[1])
            slots.choices[row] = choices = int(allowed.sum())
            if choices:  # otherwise the grammar has failed; its `accept` reports the fault
                excluded = upload(~allowed, logits_bv.device)
                probs = torch.softmax(logits_bv[row] / (owner.params.temperature or 1.0), -1)
                slots.masses[row] = float(probs[~excluded].sum())
                logits_bv[row, excluded] = -torch.inf


def penalise(logits_v: Tensor, output_ids: list[int], params: SamplingParams) -> None:
    """Applies the penalties to one row in place.

    For an id that occurs c > 0 times in the reply (the prompt does not count), the logit becomes
    logit − frequency_penalty · c − presence_penalty, multiplied by the repetition penalty if negative and
    divided by it otherwise.
    """
    ids, counts = np.unique(np.asarray(output_ids, np.int64), return_counts=True)
    index = upload(ids, logits_v.device)
    times = upload(counts, logits_v.device).to(logits_v.dtype)
    values = logits_v[index] - params.frequency_penalty * times - params.presence_penalty
    scale = params.repetition_penalty
    logits_v[index] = torch.where(values < 0, values * scale, values / scale)


def _inverse_cdf(logprobs_bv: Tensor, draws: Tensor) -> Tensor:
    """Returns the first id whose cumulative probability exceeds the draw, never an id of probability 0."""
    cumulative = logprobs_bv.double().exp_().cumsum(-1)
    targets = draws[:, None] * cumulative[:, -1:]
    ids = torch.searchsorted(cumulative, targets, right=True)[:, 0]
    return ids.clamp_(max=logprobs_bv.shape[-1] - 1)  # for rows that are not finite; their request fails


def _draw_from_top(
    logprobs_bv: Tensor, draws: Tensor, top_ps: Tensor, top_ks: Tensor, min_ps: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Draws among the `top_k` likeliest ids (0: all), of these the fewest that hold `top_p`, of these the
    ids at least `min_p` times as likely as the likeliest.

    Returns the drawn ids, all ids of each row, likeliest first, and their probabilities, 0 for those that are
    excluded, which come last.
    """
    ordered, ids = logprobs_bv.sort(dim=-1, descending=True, stable=True)
    probs = ordered.double().exp_()
    rank = torch.arange(probs.shape[-1], device=probs.device)
    limit = torch.where(top_ks > 0, top_ks, probs.shape[-1])
    probs = probs.masked_fill(rank >= limit[:, None], 0.0)
    before = probs.cumsum(-1) - probs
    outside = before > top_ps.double()[:, None] * probs.sum(-1, keepdim=True)
    outside |= probs < min_ps.double()[:, None] * probs[:, :1]
    allowed = probs.masked_fill(outside, 0.0)
    return ids.gather(-1, _inverse_cdf(allowed.log(), draws)[:, None])[:, 0], ids, allowed


def upload(array: np.ndarray, device: torch.device) -> Tensor:
    """Returns the array as a tensor on the device; on a CPU the tensor shares the array's memory.

    Copies to a GPU use page-locked memory: a copy from other memory waits for all work queued on the GPU.
    """
    tensor = torch.from_numpy(array)
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
