"""The report as one HTML page: the page itself, its sections, and the pictures in them."""

from .page import as_html

__all__ = ["as_html"]
