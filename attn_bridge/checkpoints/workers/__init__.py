"""Conversions by workers: one process, several of one machine or of many, or tasks of Ray.

`working` writes a share and reads it back, `finishing` checks every digest and publishes; `conducting` starts workers
and waits for them, as `executors` run them, `sharing` is a worker that was started independently. All access to the
target and its staging folder is in `places`.
"""

from .conducting import chosen, early, run, start
from .executors import parse
from .jobs import job_of

__all__ = ["chosen", "early", "job_of", "parse", "run", "start"]
