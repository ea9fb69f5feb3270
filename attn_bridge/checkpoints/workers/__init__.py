"""Conversions by workers: one process, several of one machine or of many, or tasks of Ray.

`working` writes a share and reads it back; `conducting` starts workers, checks every digest and publishes, and
`executors` run them; `sharing` is a worker that was started independently. All access to the target and its staging
folder is in `places`.
"""

from .conducting import check, chosen, early, run, sole_job, start
from .executors import parse
from .jobs import job_of

__all__ = ["check", "chosen", "early", "job_of", "parse", "run", "sole_job", "start"]
