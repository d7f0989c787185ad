"""What changes the logits of single rows before the temperature divides them: penalties, then grammars.

As in SGLang. For an id that is among the reply's own tokens (the prompt's do not count) c > 0 times:
logit − frequency_penalty · c − presence_penalty; then, where that is negative, times the repetition
penalty, else divided by it. Ids that a grammar does not allow get −∞.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tidegate.engine.model.device import upload
from tidegate.engine.requests.params import SamplingParams
from tidegate.engine.scheduling.slots import Slots


def adjust(logits_bv: Tensor, slots: Slots) -> None:
    """In place; also says in `slots.choices` how many ids each of these rows may choose from, and in
    `slots.masses` how probable these were together."""
    for row in np.flatnonzero(slots.adjusted[: slots.count]):
        owner = slots.owners[row]
        if owner.params.penalised:
            penalise(logits_bv[row], owner.output_ids, owner.params)
        if owner.grammar is not None:
            allowed = owner.grammar.allowed(logits_bv.shape[1])
            slots.choices[row] = choices = int(allowed.sum())
            if choices:  # else it has failed, and says so when it is to accept a token
                excluded = upload(~allowed, logits_bv.device)
                probs = torch.softmax(logits_bv[row] / (owner.params.temperature or 1.0), -1)
                slots.masses[row] = float(probs[~excluded].sum())
                logits_bv[row, excluded] = -torch.inf


def penalise(logits_v: Tensor, output_ids: list[int], params: SamplingParams) -> None:
    """In place, for one row."""
    ids, counts = np.unique(np.asarray(output_ids, np.int64), return_counts=True)
    at = upload(ids, logits_v.device)
    times = upload(counts, logits_v.device).to(logits_v.dtype)
    values = logits_v[at] - params.frequency_penalty * times - params.presence_penalty
    scale = params.repetition_penalty
    logits_v[at] = torch.where(values < 0, values * scale, values / scale)
