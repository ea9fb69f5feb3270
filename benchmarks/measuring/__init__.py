"""What the benchmarks share: cells to measure, one side in a process of its own, memory, traffic, the machine."""
