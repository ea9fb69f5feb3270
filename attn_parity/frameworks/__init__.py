"""How the judge runs code of each framework: a room each, twins; `adapters` imports them by name."""
