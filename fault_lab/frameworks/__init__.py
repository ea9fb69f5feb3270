"""The blocks that faults are planted in, as people write them in each framework: a room each, twins."""
