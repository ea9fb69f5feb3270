"""Commands on checkpoints: what they do in `commands`, `tasks` and `digest`, what they take in `options`."""
