"""Tensors of several ranks in one directory, by `torch.distributed.checkpoint`.

Each rank writes its shards; any number of ranks reads them. The library is imported on use, as its import
takes seconds.
"""

from __future__ import annotations

import errno
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.checkpoint.api import CheckpointException


def begin_save(tensors: dict[str, Tensor], directory: Path, group: dist.ProcessGroup) -> Callable[[], None]:
    """Copy this rank's shards to host memory, and write the copies in a thread.

    Every rank of the group calls it. `group` is used by the threads alone, since they run beside the ranks'
    other collective operations.

    Returns:
        Waits until all ranks have written; it raises OSError if one of them could not, and RuntimeError if
        the ranks lost each other.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
    from torch.distributed.checkpoint.state_dict_saver import async_save

    class Writer(FileSystemWriter):
        def write_data(self, *arguments: Any) -> Any:
            try:
                return super().write_data(*arguments)
            except RuntimeError as error:
                raise_hidden_os_error(error)
                raise

    # Nothing asynchronous: the policy may change as soon as this function returns.
    stager = DefaultStager(StagingOptions(False, False, False, False))
    future = async_save(tensors, storage_writer=Writer(directory), process_group=group, async_stager=stager)
    assert isinstance(future, Future)
    future.add_done_callback(lambda _: stager.close())

    def wait() -> None:
        try:
            written = future.result()
        except CheckpointException as error:
            raise _as_os_error(error) from error
        for name in {part.relative_path for part in written.storage_data.values()}:
            if not (directory / name).exists():
                raise OSError(
                    errno.ENOENT, "a trainer rank wrote it, but rank 0 does not see it: all ranks must share "
                    "the run's directory", name,
                )  # fmt: skip

    return wait


def load(tensors: dict[str, Tensor], directory: Path, group: dist.ProcessGroup | None) -> None:
    """Read tensors in place; with a group each of its ranks reads its own shards.

    Raises OSError on all ranks if a tensor is missing, has another shape or cannot be read.
    """
    from torch.distributed.checkpoint import state_dict_loader
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            state_dict_loader.load(
                tensors, checkpoint_id=directory, process_group=group, no_dist=group is None
            )
    except CheckpointException as error:
        raise _as_os_error(error) from error


def raise_hidden_os_error(error: RuntimeError) -> None:
    """Raise the OSError of a failed write, behind which torch puts its own error; return if there is none."""
    if isinstance(error.__context__, OSError):
        raise error.__context__ from None


def _as_os_error(error: CheckpointException) -> OSError:
    """Return the first rank's error as an OSError with its number: a CheckpointException is no Exception."""
    rank, (cause, _) = min(error.failures.items())
    if isinstance(cause, OSError) and cause.errno is not None:
        return OSError(cause.errno, f"trainer rank {rank}: {cause.strerror}", cause.filename)
    return OSError(errno.EIO, f"trainer rank {rank}: {type(cause).__name__}: {cause}")
