"""Our own variants, judged on this machine."""
