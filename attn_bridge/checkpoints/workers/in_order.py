"""A conversion by one process to containers that are written from their beginning to their end, in a store."""

from __future__ import annotations

from .. import containers
from ..containers.base import CheckpointError
from ..elements import Elements
from ..execution import Progress, Result, accompany, budget_of, config_beside, stamps, write_all
from ..requests import Prepared
from ..staging import naming
from .finishing import check_source
from .jobs import Job
from .places import place_of


def write_in_order(
    prepared: Prepared, *, resume: bool, overwrite: bool, max_memory: int | None, progress: Progress
) -> Result:
    """Write the target, tensor by tensor, and publish it; nothing is gone on from.

    Raises:
        CheckpointError: the target exists or can't be written, or the source changed under way.
    """
    plan, reader, place = prepared.plan, prepared.reader, place_of(prepared.target)
    place.check(reader, prepared.is_folder)
    place.check_free(overwrite)
    budget = budget_of(plan, max_memory)
    job = Job.of(prepared, 1, budget)
    reason = f"a file of {containers.writer_class(prepared.format).format} is written from its beginning on"
    with place.alone():
        try:
            place.begin(job, anew=True)
            place.expect(plan.nbytes, in_one_file=True)
            files = stamps(reader)
            elements = Elements(reader, None if prepared.before is None else prepared.before.kept, budget)
            check_source(prepared, budget)
            infos = [target.info for target in plan.targets]
            own = config_beside(plan, reader, None) if prepared.is_folder else None
            with naming(place.beside(prepared.is_folder)[0], prepared.target, plan.target_layout):
                writer = place.writer(prepared.format, infos, plan.metadata, is_share=False)
            try:
                digests, changed = write_all(plan, reader, elements, writer, {}, budget, progress, lambda entry: None)
                if stamps(reader, anew=True) != files:
                    raise CheckpointError(f"{reader.path} changed while it was read; convert it again")
                writer.finish()
            except BaseException:
                writer.abort()
                raise
            accompany(plan, reader, elements, prepared.before, *place.beside(prepared.is_folder), digests, own, budget)
            place.check_free(overwrite)
            place.publish(prepared.is_folder)
        except BaseException:
            if not place.was_published():
                place.clear()
            raise
    return Result(prepared.target, digests, changed, 0, reason if resume else "")
