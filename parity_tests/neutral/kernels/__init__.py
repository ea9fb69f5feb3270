"""The kernels for processors, called without a framework."""
