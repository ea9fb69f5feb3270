"""How a side is run: promoted to float64, rounded at random, differentiated; and all that it changes is put back."""
