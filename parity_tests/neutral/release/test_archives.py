"""The same files make the same archive, whoever packs them and when."""

import gzip
import io
import tarfile

from release.archives import normalise

FILES = {"a-1/run.sh": (b"echo", 0o755), "a-1/b.py": (b"x = 1\n" * 1000, 0o664), "a-1/c/deep.txt": (b"", 0o600)}


def pack(path, names, when, owner):
    with tarfile.open(path, "w:gz") as archive:
        for name in names:
            data, mode = FILES[name]
            entry = tarfile.TarInfo(name)
            entry.size, entry.mtime, entry.mode, entry.uname, entry.uid = len(data), when, mode, owner, len(owner)
            archive.addfile(entry, io.BytesIO(data))


def test_archives_packed_at_other_times_by_others_are_the_same(tmp_path):
    one, two = tmp_path / "one.tar.gz", tmp_path / "two.tar.gz"
    pack(one, FILES, 1000.5, "me")
    pack(two, reversed(FILES), 2000, "somebody")
    assert one.read_bytes() != two.read_bytes()
    for path in (one, two):
        normalise(path, 1_700_000_000)
    assert one.read_bytes() == two.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one.tar.gz", "two.tar.gz"]


def test_what_is_packed_stays_as_it_was(tmp_path):
    path = tmp_path / "one.tar.gz"
    pack(path, FILES, 1000, "me")
    normalise(path, 1_700_000_000)
    with gzip.open(path) as packed:
        packed.read()
        assert packed.mtime == 1_700_000_000
    with tarfile.open(path) as archive:
        found = {one.name: (archive.extractfile(one).read(), one.mode) for one in archive}
        assert {one.mtime for one in archive} == {1_700_000_000}
    assert found == {name: (data, 0o755 if mode & 0o100 else 0o644) for name, (data, mode) in FILES.items()}
