"""Judge some entries of the gallery and print their table: ``python -m parity_tests.wild [--outside] [ENTRY ...]``

All of them, with a report, are judged by ``attn-bridge mutate --gallery parity_tests.wild.gallery``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from fault_lab.gallery import HEADINGS, judge_trial, plan_gallery, summarised

HERE, OUTSIDE = "parity_tests.wild.gallery", "parity_tests.wild.gallery:outside"


def main(words: Sequence[str]) -> int:
    """Judge the entries whose names begin with one of the words, or all; exit 1 if anything is wrong."""
    names = tuple(word for word in words if not word.startswith("-"))
    trials = plan_gallery(OUTSIDE if "--outside" in words else HERE)
    print(" | ".join(HEADINGS))
    findings = []
    for trial in trials:
        if trial.entry.startswith(names or ""):
            findings.append(judge_trial(trial))
            print(" | ".join(findings[-1].row()), flush=True)
    print(f"\n{summarised(findings)}")
    return 0 if all(one.right == "yes" for one in findings) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
