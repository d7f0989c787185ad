"""One rank that loads a model, resumes and saves: `python -m tests.host_memory DIR RANK`.

Reads `model` and `trainer.pt` of the directory, and saves a checkpoint. Prints the peak of its memory after
the model was loaded and after the resume, and its own memory when the checkpoint is copied, in bytes beyond
those before.
"""

from __future__ import annotations

import re
import sys
from functools import partial
from pathlib import Path

import torch.distributed as dist

from tidegate.config import TrainerSettings
from tidegate.trainer.checkpoint import checkpoint as checkpoints
from tidegate.trainer.distributed.rank_main import RankInit


def memory(name: str) -> int:
    """Bytes; `getrusage` would count the process that started this one, too."""
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


peak = partial(memory, "VmHWM")


def main(directory: Path, rank: int) -> None:
    store = dist.FileStore(str(directory / "store"), 2)
    init = RankInit(TrainerSettings(ranks=2, learning_rate=1e-3), directory / "model", 0, ("", 0), 60)
    import transformers.models.qwen3.modeling_qwen3  # noqa: F401 - code takes memory, too

    before, own = peak(), memory("RssAnon")
    policy = init.join(rank, store)
    loaded = peak() - before
    policy.load_state_from(directory / "trainer.pt")
    policy.load_weights(directory / "model")
    resumed = peak() - before
    write = checkpoints.begin(directory, 1, policy, {})
    print(loaded, resumed, memory("RssAnon") - own)
    if rank == 0:
        write()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
