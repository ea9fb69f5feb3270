"""Print the table of uses of both backends, in Markdown; exit 1 if one fails."""

from __future__ import annotations

import sys

from . import jax_uses, torch_uses
from .table import as_markdown, rows

table = rows(torch_uses.USES, jax_uses.USES)
print(as_markdown(table))
sys.exit(any(cell.startswith("**fails") for row in table for cell in row))
