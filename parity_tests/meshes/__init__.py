"""Modules over many devices, simulated on this processor, each test in processes of its own."""
