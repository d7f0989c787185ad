"""Files and processes that an agent leaves in a sandbox to mislead a reader of snapshots, or a verifier."""

from __future__ import annotations

import asyncio
import io
import os
import tarfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from tidegate.sandbox import Sandbox, verify_fresh
from tidegate.sandbox.inside.archive import OverLimit

World = dict[str, Any]
Trick = Callable[[Sandbox, World], Awaitable[bool]]
"""Returns whether it succeeded."""
NAIVE_BYTES = 600 << 20
DAEMON = """
import os, time
if os.fork() == 0:
    os.setsid()
    while True:
        open('.new', 'w').write('42'); os.replace('.new', 'answer'); time.sleep(0.005)
"""


def _naive(box: Sandbox, *, dereference: bool = True) -> tarfile.TarFile:
    """A tar as it is made without care."""
    output = io.BytesIO()
    with tarfile.open(fileobj=output, mode="w", dereference=dereference) as archive:
        archive.add(box.work, ".")
    output.seek(0)
    return tarfile.open(fileobj=output)


def _content(archive: tarfile.TarFile) -> bytes:
    return b"".join(archive.extractfile(one).read() for one in archive if one.isfile())  # type: ignore[union-attr]


async def _snapshot(box: Sandbox) -> tarfile.TarFile:
    return tarfile.open(fileobj=io.BytesIO(await box.snapshot()))


async def link_to_file(box: Sandbox, world: World, *, naive: bool = False) -> bool:
    await box.run(["ln", "-s", world["file"], "link"])
    archive = await asyncio.to_thread(_naive, box) if naive else await _snapshot(box)
    return world["token"].encode() in _content(archive)


async def link_to_folder(box: Sandbox, world: World, *, naive: bool = False) -> bool:
    await box.run(["ln", "-s", str(Path(world["file"]).parent), "folder"])
    archive = await asyncio.to_thread(_naive, box) if naive else await _snapshot(box)
    return world["token"].encode() in _content(archive)


async def setuid_file(box: Sandbox, world: World, *, naive: bool = False) -> bool:
    await box.run("cp /bin/sh shell; chmod 4755 shell")
    archive = await asyncio.to_thread(_naive, box) if naive else await _snapshot(box)
    return any(member.mode & 0o6000 for member in archive)


async def sparse_files(box: Sandbox, world: World, *, naive: bool = False) -> bool:
    await box.run("for number in 1 2 3 4 5 6 7 8; do truncate -s 100M sparse$number; done")
    if naive:
        archive = await asyncio.to_thread(_naive, box)
        return sum(member.size for member in archive) > NAIVE_BYTES
    try:
        return len(await box.snapshot()) > NAIVE_BYTES
    except OverLimit:
        return False


async def traversal(box: Sandbox, world: World, *, naive: bool = False) -> bool:
    output, name = io.BytesIO(), f"../../../../../..{world['planted']}"
    with tarfile.open(fileobj=output, mode="w") as archive:
        archive.addfile(tarfile.TarInfo(name))
    if naive:
        output.seek(0)
        with tarfile.open(fileobj=output) as archive:
            archive.extractall(box.work, filter="fully_trusted")
    else:
        try:
            await box.restore(output.getvalue())
        except OverLimit:
            return False
    return os.path.exists(world["planted"])  # noqa: ASYNC240 - in a script


async def link_in_a_tar(box: Sandbox, world: World, *, naive: bool = False) -> bool:
    output = io.BytesIO()
    with tarfile.open(fileobj=output, mode="w") as archive:
        link = tarfile.TarInfo("folder")
        link.type, link.linkname = tarfile.SYMTYPE, str(Path(world["planted"]).parent)
        archive.addfile(link)
        archive.addfile(tarfile.TarInfo(f"folder/{Path(world['planted']).name}"))
    if naive:
        output.seek(0)
        with tarfile.open(fileobj=output) as archive:
            archive.extractall(box.work, filter="fully_trusted")
    else:
        await box.restore(output.getvalue())
    return os.path.exists(world["planted"])  # noqa: ASYNC240 - in a script


async def _verified(box: Sandbox, check: str, files: dict[str, bytes | str], naive: bool) -> bool:
    if not naive:
        return (await verify_fresh(box, check, files)).ok
    await box.add_files(files)
    return (await box.run(check)).ok


async def daemon_that_answers(box: Sandbox, world: World, *, naive: bool = False) -> bool:
    await box.run(["python3", "-c", DAEMON])
    await box.run("until grep -q 42 answer; do sleep 0.01; done")
    check = "echo wrong > answer; sleep 0.3; grep -q 42 answer"
    return await _verified(box, check, {}, naive)


async def changed_tool(box: Sandbox, world: World, *, naive: bool = False) -> bool:
    tool = f"{world['scratch']}/tool"
    await box.run(
        [
            "sh",
            "-c",
            f"mkdir -p {world['scratch']} && printf '#!/bin/sh\\nexit 0\\n' > {tool} && chmod +x {tool}",
        ]
    )
    return await _verified(box, tool, {}, naive)


async def link_to_the_answer(box: Sandbox, world: World, *, naive: bool = False) -> bool:
    expected = f"{world['scratch']}/expected"
    await box.run(["ln", "-s", expected, "answer"])
    return await _verified(box, f"cmp answer {expected}", {expected: "42"}, naive)


TRICKS: dict[str, Any] = {
    "snapshot: a link to a file of the host": link_to_file,
    "snapshot: a link to a folder of the host": link_to_folder,
    "snapshot: a setuid file": setuid_file,
    "snapshot: huge sparse files": sparse_files,
    "restore: a name with dots": traversal,
    "restore: a link in the tar": link_in_a_tar,
    "verification: a process that changes files": daemon_that_answers,
    "verification: a changed tool outside of the files": changed_tool,
    "verification: a link to the expected answer": link_to_the_answer,
}
