"""Ways for the tokens of a device to meet those of the others."""
