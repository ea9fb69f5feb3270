"""How the parity judge runs JAX modules."""
