"""A transformer block for many devices, written as people write it, and with faults that they make."""
