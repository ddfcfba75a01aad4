"""List the files of a folder or a zip without opening them; make names safe and refuse links.

An archive may state wrong sizes, names and encodings. Names are decoded here, once. Nothing is
ever unpacked to a path that a name gives. Bytes are read up to a limit, and never more.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import stat
import unicodedata
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePosixPath

from autograder.errors import CommandFailed
from autograder.tables import TURNS

MAX_ENTRIES = 50_000
"""Largest number of files in one archive or folder: enough for three hundred students."""
_JUNK = {"__MACOSX", ".DS_Store", "Thumbs.db", ".ipynb_checkpoints", "__pycache__", "desktop.ini"}
_UTF8 = 0x800
_ENCRYPTED = 0x1
_NOT_READ = (
    *(zipfile.BadZipFile, zlib.error, OSError, EOFError, ValueError),
    *(RuntimeError, NotImplementedError),  # encrypted, or compressed in a way that Python lacks
)
_HANZI = re.compile("[\u3400-\u9fff]{2}")


class SourceError(CommandFailed):
    """Nothing can be collected from a source; the message says why, and what to do."""


@dataclass(frozen=True)
class Entry:
    """One file.

    Attributes:
        path: its relative name, with ``/``; for a refused file, as much of it as is known.
        refusal: why it must not be read, or empty.
        read: returns at most the given number of bytes, or one byte more if the file is longer.
        modified: when it was last changed, in seconds since 1970; 0 if unknown.

    """

    path: str
    refusal: str
    read: Callable[[int], bytes]
    modified: float = 0.0

    @property
    def name(self) -> str:
        """The last part of the path."""
        return PurePosixPath(self.path).name


def list_source(source: Path) -> list[Entry]:
    """Return the files of a folder or a zip, sorted by name, without files that systems hide.

    Raises:
        SourceError: the source is neither a folder nor a zip, or cannot be read.

    """
    if source.is_dir():
        return list(_of_folder(source))
    if not source.is_file():
        raise SourceError(f"there is no file or folder {source}")
    try:
        return list_zip(source)
    except SourceError as error:
        raise SourceError(f"{source.name} {error}") from error


def list_zip(source: Path | io.BytesIO) -> list[Entry]:
    """Return the files in a zip, which stays open as long as one of them may be read.

    Raises:
        SourceError: it is no zip, or has too many entries. The message continues the zip's name.

    """
    try:
        archive = zipfile.ZipFile(source)
    except _NOT_READ as error:
        raise SourceError(f"cannot be read as a zip: {error}") from error
    infos = archive.infolist()
    if len(infos) > MAX_ENTRIES:
        raise SourceError(
            f"holds {len(infos)} files and folders, but at most {MAX_ENTRIES} are accepted"
        )
    return [
        _of_member(archive, info)
        for info in infos
        if not info.is_dir() and not _is_junk(_decoded(info))
    ]


def inner_zip(entry: Entry, limit: int) -> list[Entry]:
    """Return the files in a zip that is itself in a folder or in another zip.

    Raises:
        SourceError: it is larger than `limit` bytes, or it is no zip. The message continues
            the zip's name.

    """
    data = entry.read(limit)
    if len(data) > limit:
        raise SourceError(f"is larger than {limit // 2**20} MiB")
    return list_zip(io.BytesIO(data))


def without_top(entries: Sequence[Entry]) -> list[Entry]:
    """Return the files without the folder that all of them are in, if there is one."""
    tops = {entry.path.partition("/")[0] for entry in entries}
    inside = [entry.path.partition("/")[2] for entry in entries]
    if len(tops) != 1 or not all(inside):
        return list(entries)
    return [replace(entry, path=path) for entry, path in zip(entries, inside, strict=True)]


def files_below(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Yield everything below a folder except folders, sorted; links are not followed."""
    for top, folders, names in os.walk(folder):
        links = [name for name in folders if Path(top, name).is_symlink()]
        folders[:] = sorted(set(folders) - set(links))
        for name in sorted((*names, *links)):
            yield Path(top, name), os.lstat(Path(top, name))


def _of_folder(folder: Path) -> Iterator[Entry]:
    count = 0
    for path, info in files_below(folder):
        relative = path.relative_to(folder).as_posix()
        if _is_junk(relative):
            continue
        if (count := count + 1) > MAX_ENTRIES:
            raise SourceError(f"{folder} has more than {MAX_ENTRIES} files")
        shown = relative.encode("utf-8", "replace").decode("utf-8")
        shown = unicodedata.normalize("NFC", shown)
        refusal = _refusal(relative, info.st_mode)
        yield Entry(shown, refusal, partial(_read_file, path), info.st_mtime)


def _read_file(path: Path, limit: int) -> bytes:
    # The file may have become a link or a pipe since it was listed.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as stream:
        return stream.read(limit + 1)


def _of_member(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> Entry:
    path = _decoded(info)
    encrypted = "is encrypted" if info.flag_bits & _ENCRYPTED else ""

    def read(limit: int) -> bytes:
        try:
            with archive.open(info) as file:
                return file.read(limit + 1)
        except _NOT_READ as error:
            raise OSError(f"cannot be unpacked: {error}") from error

    return Entry(path, _refusal(path, info.external_attr >> 16) or encrypted, read)


def _decoded(info: zipfile.ZipInfo) -> str:
    """Return a member's name, decoded again if it lacks the mark for UTF-8.

    Without the mark, Python decodes a name as code page 437. But many systems write UTF-8 without
    the mark, and Chinese Windows writes GBK. A single letter with an accent looks like GBK too, so
    a name counts as GBK only if it has two Chinese characters next to each other.
    """
    name = info.orig_filename
    if not info.flag_bits & _UTF8:
        raw = name.encode("cp437", "replace")
        for encoding in ("utf-8", "gbk"):
            with contextlib.suppress(UnicodeDecodeError):
                guess = raw.decode(encoding)
                if encoding == "utf-8" or _HANZI.search(guess):
                    name = guess
                    break
    name = unicodedata.normalize("NFC", name.replace("\\", "/"))
    return str(PurePosixPath(name)).removeprefix("./")


def _refusal(path: str, mode: int) -> str:
    """Return why a file of this name and mode is refused, or an empty string."""
    if stat.S_ISLNK(mode):
        return "is a link"
    if stat.S_IFMT(mode) not in (0, stat.S_IFREG):  # 0: a zip may not say it
        return "is not an ordinary file"
    parts = path.split("/")
    if path.startswith("/") or ".." in parts or (len(path) > 1 and path[1] == ":"):
        return "has a path that leads out of the submission"
    if any(unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp") or c in TURNS for c in path):
        return "has a name with control characters"
    sizes = [len(part.encode("utf-8", "replace")) for part in parts]
    if sum(sizes) > 1000 or max(sizes) > 200:
        return "has a name that is too long"
    return ""


def _is_junk(path: str) -> bool:
    parts = path.split("/")
    return bool(_JUNK & set(parts)) or parts[-1].startswith("._")
