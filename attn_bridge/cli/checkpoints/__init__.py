"""Commands on checkpoints: their functions in `commands`, `tasks` and `digest`, their arguments in `options`."""
