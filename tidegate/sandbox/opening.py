"""Opens a sandbox of any backend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tidegate.errors import ConfigError
from tidegate.loading import did_you_mean
from tidegate.sandbox.bubblewrap import BubblewrapSandbox
from tidegate.sandbox.containers import ContainerSandbox
from tidegate.sandbox.limits import SandboxLimits
from tidegate.sandbox.sandbox import Sandbox
from tidegate.sandbox.unprotected import UnprotectedSandbox

BACKENDS = ("bubblewrap", "docker", "podman", "none")


def check_backend(backend: str, read_only: Sequence[str] = (), image: str | None = None) -> None:
    """Raises ConfigError if there is no such backend, or it does not take one of the options."""
    if backend not in BACKENDS:
        raise ConfigError(f"there is no sandbox backend {backend!r}{did_you_mean(backend, BACKENDS)}")
    if image is not None and backend not in ("docker", "podman"):
        raise ConfigError(f"the sandbox backend {backend!r} takes no image")
    if read_only and backend != "bubblewrap":
        raise ConfigError(f"the sandbox backend {backend!r} takes no read_only paths")


async def open_sandbox(
    limits: SandboxLimits | None = None,
    backend: str = "bubblewrap",
    files: Mapping[str, bytes | str] | None = None,
    *,
    read_only: Sequence[str] = (),
    image: str | None = None,
    links: Mapping[str, str] | None = None,
) -> Sandbox:
    """Opens a sandbox, which the caller closes: `async with await open_sandbox() as box`.

    Args:
        limits: Limits; `SandboxLimits()` by default.
        backend: `bubblewrap`, `docker`, `podman`, or `none`, which protects from nothing.
        files: Files to write first, as path → content.
        read_only: Files and folders of the host that programs in it can read, under the same paths; for
            `bubblewrap` only.
        image: Image of a container, for `docker` and `podman` only.
        links: Symbolic links in the sandbox, as absolute path → target; for `bubblewrap` only.

    Raises:
        ConfigError: The backend is unknown, or does not take an option.
        SandboxError: The sandbox cannot start.
        OSError: A file cannot be written.
    """
    check_backend(backend, read_only, image)
    if links and backend != "bubblewrap":
        raise ConfigError(f"the sandbox backend {backend!r} takes no links")
    box: BubblewrapSandbox | ContainerSandbox | UnprotectedSandbox
    if backend == "bubblewrap":
        box = BubblewrapSandbox(limits or SandboxLimits(), read_only, links)
    elif backend == "none":
        box = UnprotectedSandbox(limits or SandboxLimits())
    else:
        box = ContainerSandbox(limits or SandboxLimits(), backend, image)
    await box.start()
    try:
        if files:
            await box.add_files(files)
    except BaseException:
        await box.close()
        raise
    return box
