"""The settings of both frameworks that change numbers: what they are, and how to hold them."""
