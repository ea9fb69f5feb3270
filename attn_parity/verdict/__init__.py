"""From runs to verdicts: how samples are run, the criterion, what is allowed, what was not seen."""
