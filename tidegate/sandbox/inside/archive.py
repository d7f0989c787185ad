"""Packs a folder into a tar of plain files and folders, and checks and unpacks such a tar.

A snapshot has the contents, names and executable bits of files. Symbolic links, devices, sockets, FIFOs,
owners and setuid bits are left out; a hard link is a file of its own.
"""

from __future__ import annotations

import errno
import io
import os
import stat
import tarfile

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import IO, BinaryIO

MAX_FILES = 100_000
"""Most files and folders in a snapshot."""
MAX_DEPTH = 64
"""Folders below this depth are left out."""
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class OverLimit(ValueError):
    """A tar, or the files for one, exceed a limit or have invalid names."""


def pack(root: str, output: BinaryIO, max_bytes: int) -> None:
    """Writes the files below a folder as a tar; raises OverLimit if they are too many or too large."""
    budget = _Budget(max_bytes)
    with tarfile.open(fileobj=output, mode="w|", format=tarfile.PAX_FORMAT) as archive:
        for path, name in _below(root):
            info = tarfile.TarInfo(name)
            if stat.S_ISDIR(os.lstat(path).st_mode):
                budget.spend(name, 0)
                archive.addfile(_plain(info, True, 0, False))
                continue
            try:
                descriptor = os.open(path, _READ)
            except OSError:  # a file without the right to read it, or removed meanwhile
                continue
            with open(descriptor, "rb") as file:
                status = os.fstat(descriptor)
                if stat.S_ISREG(status.st_mode):
                    budget.spend(name, status.st_size)
                    executable = bool(status.st_mode & stat.S_IXUSR)
                    archive.addfile(_plain(info, False, status.st_size, executable), _Exactly(file))


def unpack(source: BinaryIO, root: str) -> None:
    """Writes a checked tar's files into a folder; replaces links and files of the same names."""
    with tarfile.open(fileobj=source, mode="r|") as archive:
        for member in archive:
            path = os.path.join(root, member.name)
            if member.isdir():
                os.makedirs(path, exist_ok=True)
            elif (content := archive.extractfile(member)) is not None:
                write_file(path, content, member.mode)


def write_file(path: str, content: IO[bytes], mode: int = 0o644) -> None:
    """Writes a file, with its folders; replaces a link instead of writing to its target."""
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    if os.path.islink(path):
        os.unlink(path)
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with open(os.open(path, flags, mode & 0o755), "wb") as file:
        _check_regular(file.fileno(), path)
        while block := content.read(1 << 16):
            file.write(block)
        os.fchmod(file.fileno(), mode & 0o755)


def read_file(path: str, output: BinaryIO, max_bytes: int) -> None:
    """Copies a file; raises OSError if it is not a regular file or is larger than `max_bytes`."""
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        _check_regular(file.fileno(), path)
        left = max_bytes
        while block := file.read(1 << 16):
            if (left := left - len(block)) < 0:
                raise OSError(errno.EFBIG, f"larger than {max_bytes} bytes", path)
            output.write(block)


def make_tar(files: dict[str, tuple[bytes, bool]]) -> bytes:
    """Returns a tar of files, given as name → (content, whether it is executable)."""
    output = io.BytesIO()
    with tarfile.open(fileobj=output, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, (content, executable) in files.items():
            info = tarfile.TarInfo(checked_name(name))
            archive.addfile(_plain(info, False, len(content), executable), io.BytesIO(content))
    return output.getvalue()


def clean_tar(data: bytes, max_bytes: int) -> bytes:
    """Returns a tar of a tar's plain files and folders, with checked names.

    Args:
        data: A tar from anywhere.
        max_bytes: Most bytes of all files together.

    Raises:
        OverLimit: The tar is not one, has invalid names, or exceeds a limit.
    """
    output, budget = io.BytesIO(), _Budget(max_bytes)
    try:
        with (
            tarfile.open(fileobj=io.BytesIO(data)) as source,
            tarfile.open(fileobj=output, mode="w", format=tarfile.PAX_FORMAT) as archive,
        ):
            for member in source:
                name = member.name.removeprefix("./").rstrip("/")
                if (
                    name in ("", ".")
                    or member.issym()
                    or not (member.isfile() or member.isdir() or member.islnk())
                ):
                    continue
                info = tarfile.TarInfo(checked_name(name))
                content = None if member.isdir() else source.extractfile(member)
                size = 0 if content is None else _size_of(source, member)
                budget.spend(name, size)
                archive.addfile(_plain(info, member.isdir(), size, bool(member.mode & stat.S_IXUSR)), content)
    except (tarfile.TarError, KeyError, EOFError, UnicodeError) as error:
        raise OverLimit(f"the tar is damaged: {error!r}") from error
    return output.getvalue()


def checked_name(name: str) -> str:
    """Returns a relative file name; raises OverLimit if it is absolute, has `..` or is too long."""
    parts = name.split("/")
    if not name or name.startswith("/") or ".." in parts or "\0" in name or len(name) > 4_000:
        raise OverLimit(f"{name[:200]!r} is not a file name below the folder")
    return name


class _Budget:
    def __init__(self, max_bytes: int) -> None:
        self._max, self._bytes, self._files = max_bytes, 0, 0

    def spend(self, name: str, size: int) -> None:
        self._bytes += size
        self._files += 1
        if self._bytes > self._max:
            raise OverLimit(f"the files have more than {self._max} bytes, with {name[:200]!r} ({size} bytes)")
        if self._files > MAX_FILES:
            raise OverLimit(f"there are more than {MAX_FILES} files")


class _Exactly:
    """A file that has zeros where it became shorter since its size was read."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def read(self, size: int = -1, /) -> bytes:
        return self._file.read(size).ljust(size, b"\0")


def _below(root: str) -> Iterator[tuple[str, str]]:
    """Returns path and name of each file and folder below a folder; links are not followed."""
    folders, device = [(root, "", 0)], os.lstat(root).st_dev
    while folders:
        folder, prefix, depth = folders.pop()
        try:
            entries = sorted(os.listdir(folder))
        except OSError:  # a folder without the right to list it
            continue
        for entry in entries:
            path, name = os.path.join(folder, entry), prefix + entry
            status = os.lstat(path)
            mode = status.st_mode
            if status.st_dev != device:  # something mounted
                continue
            if stat.S_ISREG(mode) or (stat.S_ISDIR(mode) and depth < MAX_DEPTH):
                yield path, name
            if stat.S_ISDIR(mode) and depth < MAX_DEPTH:
                folders.append((path, name + "/", depth + 1))


def _plain(info: tarfile.TarInfo, folder: bool, size: int, executable: bool) -> tarfile.TarInfo:
    info.type = tarfile.DIRTYPE if folder else tarfile.REGTYPE
    info.size = size
    info.mode = 0o755 if folder or executable else 0o644
    return info


def _size_of(source: tarfile.TarFile, member: tarfile.TarInfo) -> int:
    return source.getmember(member.linkname).size if member.islnk() else member.size


def _check_regular(descriptor: int, path: str) -> None:
    status = os.fstat(descriptor)
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "not a regular file", path)
