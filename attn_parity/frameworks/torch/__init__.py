"""How the parity judge runs torch modules."""
