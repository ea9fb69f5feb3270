"""What a conversion to a store should write."""

from __future__ import annotations

from attn_bridge import checkpoints


def ours(source, tmp_path, name, **options):
    """Return name -> bytes of what a local conversion writes."""
    (tmp_path / "local").mkdir(exist_ok=True)
    target = tmp_path / "local" / name
    checkpoints.convert(source, target, **options)
    beside = target.parent.glob(f"{name}.attn-bridge*")
    files = [*beside, *([target] if target.is_file() else [one for one in target.rglob("*") if one.is_file()])]
    return {one.relative_to(target.parent).as_posix(): one.read_bytes() for one in files}
