"""Files next to a side's own: which of several modules of a name it imports."""

from __future__ import annotations

from attn_parity import factories


def test_a_side_imports_the_files_of_its_folder_before_all_others(tmp_path, monkeypatch):
    for name in ("elsewhere", "here"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "neighbour_of_a_side.py").write_text(f"FOLDER = {name!r}\n")
    (tmp_path / "here" / "side.py").write_text(
        "from neighbour_of_a_side import FOLDER\n\ndef build():\n    return FOLDER\n"
    )
    monkeypatch.syspath_prepend(tmp_path / "elsewhere")
    with factories.workspace():
        assert factories.load(f"{tmp_path / 'here' / 'side.py'}:build").target() == "here"
