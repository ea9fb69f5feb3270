"""How XLA calls a kernel: its C interface, and the threads that share the work of a call."""
