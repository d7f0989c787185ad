"""Snapshots: what is packed, and what a tar may not contain."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

import pytest

from tidegate.sandbox.inside.archive import (
    OverLimit,
    clean_tar,
    make_tar,
    pack,
    read_file,
    unpack,
    write_file,
)


def packed(folder: Path, max_bytes: int = 10_000) -> dict[str, tuple[bytes | None, int]]:
    output = io.BytesIO()
    pack(str(folder), output, max_bytes)
    return listed(output.getvalue())


def listed(tar: bytes) -> dict[str, tuple[bytes | None, int]]:
    """Name → content (None for a folder) and mode."""
    with tarfile.open(fileobj=io.BytesIO(tar)) as archive:
        members = {one.name: (archive.extractfile(one), one.mode) for one in archive}
        return {name: (file and file.read(), mode) for name, (file, mode) in members.items()}


def tar_of(*members: tarfile.TarInfo) -> bytes:
    output = io.BytesIO()
    with tarfile.open(fileobj=output, mode="w") as archive:
        for member in members:
            archive.addfile(member, io.BytesIO(b"x" * member.size))
    return output.getvalue()


def member(name: str, kind: bytes = tarfile.REGTYPE, target: str = "", size: int = 0) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size, info.mode = kind, target, size, 0o6777
    return info


def test_files_and_folders_are_packed_and_everything_else_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "text").write_text("hello")
    (tmp_path / "program").write_text("#!/bin/sh")
    (tmp_path / "program").chmod(0o4755)
    os.link(tmp_path / "program", tmp_path / "hard")
    (tmp_path / "link").symlink_to("/etc/passwd")
    (tmp_path / "folder").symlink_to("/etc")
    os.mkfifo(tmp_path / "fifo")
    assert packed(tmp_path) == {
        "a": (None, 0o755), "a/b": (None, 0o755), "a/b/text": (b"hello", 0o644),
        "program": (b"#!/bin/sh", 0o755), "hard": (b"#!/bin/sh", 0o755),
    }  # fmt: skip


def test_sparse_files_are_counted_by_their_length(tmp_path: Path) -> None:
    with open(tmp_path / "sparse", "wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(OverLimit, match=r"more than 10000 bytes, with 'sparse' \(1099511627776 bytes\)"):
        packed(tmp_path)


def test_deep_folders_end_somewhere(tmp_path: Path) -> None:
    deep = tmp_path
    for _ in range(80):
        deep = deep / "d"
        deep.mkdir()
    assert len(packed(tmp_path)) == 64


@pytest.mark.parametrize("name", ["/etc/passwd", "../x", "a/../../x", "a\0b", "x" * 5000])
def test_names_outside_the_folder_are_refused(name: str) -> None:
    with pytest.raises(OverLimit, match=r"not a file name below the folder|damaged"):
        clean_tar(make_unchecked(name), 1000)
    with pytest.raises(OverLimit, match="not a file name below the folder"):
        make_tar({name: (b"", False)})


def make_unchecked(name: str) -> bytes:
    """A tar with this name as a PAX header, which can hold any."""
    output = io.BytesIO()
    with tarfile.open(fileobj=output, mode="w", format=tarfile.PAX_FORMAT) as archive:
        info = tarfile.TarInfo("x")
        info.pax_headers = {"path": name}
        archive.addfile(info)
    return output.getvalue()


def test_links_and_devices_of_a_tar_are_dropped_and_modes_are_plain() -> None:
    tar = tar_of(
        member("link", tarfile.SYMTYPE, "/etc"),
        member("link/file", size=3),
        member("device", tarfile.CHRTYPE),
        member("fifo", tarfile.FIFOTYPE),
        member("hard", tarfile.LNKTYPE, "link/file"),
    )
    assert listed(clean_tar(tar, 1000)) == {"link/file": (b"xxx", 0o755), "hard": (b"xxx", 0o755)}


def test_a_hard_link_to_a_link_brings_nothing_in() -> None:
    tar = tar_of(member("link", tarfile.SYMTYPE, "/etc/passwd"), member("hard", tarfile.LNKTYPE, "link"))
    with pytest.raises(OverLimit, match="damaged"):
        clean_tar(tar, 1000)


@pytest.mark.parametrize("tar", [b"", b"no tar at all" * 100, tar_of(member("x", size=3))[:600]])
def test_a_damaged_tar_is_refused(tar: bytes) -> None:
    with pytest.raises(OverLimit, match="damaged"):
        clean_tar(tar, 1000)


def test_a_tar_beyond_the_limit_is_refused() -> None:
    with pytest.raises(OverLimit, match="more than 5 bytes"):
        clean_tar(tar_of(member("a", size=3), member("b", size=3)), 5)


def test_unpacking_replaces_links_instead_of_following_them(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_text("untouched")
    work = tmp_path / "work"
    work.mkdir()
    (work / "file").symlink_to(outside)
    unpack(io.BytesIO(make_tar({"file": (b"new", False), "a/run": (b"#!", True)})), str(work))
    assert outside.read_text() == "untouched"
    assert ((work / "file").read_text(), (work / "a" / "run").stat().st_mode & 0o777) == ("new", 0o755)


def test_pipes_and_folders_are_neither_read_nor_written(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", tmp_path):
        with pytest.raises(OSError):
            read_file(str(path), io.BytesIO(), 100)
        with pytest.raises(OSError):
            write_file(str(path), io.BytesIO(b"x"))
