"""The settings of both frameworks that change numbers: read and fix them."""
