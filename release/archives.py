"""Archives whose bytes are told by what is in them: the same commit gives the same file wherever it is built."""

from __future__ import annotations

import gzip
import io
import tarfile
from pathlib import Path


def normalise(sdist: Path, when: int) -> None:
    """Write a ``.tar.gz`` again, its files in order of their names, owned by nobody, and all of one time.

    Args:
        sdist: the file, which is replaced.
        when: seconds since 1970.
    """
    out = io.BytesIO()
    with (
        tarfile.open(sdist) as old,
        gzip.GzipFile(fileobj=out, mode="wb", filename="", mtime=when) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as new,
    ):
        for one in sorted(old.getmembers(), key=lambda member: member.name):
            entry = tarfile.TarInfo(one.name)
            entry.type, entry.size, entry.linkname, entry.mtime = one.type, one.size, one.linkname, when
            entry.mode = 0o755 if one.isdir() or one.mode & 0o100 else 0o644
            new.addfile(entry, old.extractfile(one) if one.isfile() else None)
    part = sdist.with_name(f"{sdist.name}.part")
    part.write_bytes(out.getvalue())
    part.replace(sdist)
