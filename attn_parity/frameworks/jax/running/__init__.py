"""How a side is run: traced, promoted to float64, evaluated by NumPy, differentiated."""
