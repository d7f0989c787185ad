"""Logits processors of single rows, applied before the temperature: penalties, then grammars, as in SGLang.

For an id that occurs c > 0 times in the reply (the prompt does not count), the logit becomes
logit − frequency_penalty · c − presence_penalty, multiplied by the repetition penalty if negative and divided
by it otherwise. Ids that the grammar excludes get −∞.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tidegate.engine.model.device import upload
from tidegate.engine.requests.params import SamplingParams
from tidegate.engine.scheduling.slots import Slots


def process_logits(logits_bv: Tensor, slots: Slots) -> None:
    """Changes logits in place; sets `Slots.choices` to the number of ids that each row's grammar allows and
    `Slots.masses` to their total probability."""
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
    """Applies the penalties to one row in place."""
    ids, counts = np.unique(np.asarray(output_ids, np.int64), return_counts=True)
    index = upload(ids, logits_v.device)
    times = upload(counts, logits_v.device).to(logits_v.dtype)
    values = logits_v[index] - params.frequency_penalty * times - params.presence_penalty
    scale = params.repetition_penalty
    logits_v[index] = torch.where(values < 0, values * scale, values / scale)
