"""From runs to verdicts: runs of samples, the criterion, allowances, coverage."""
