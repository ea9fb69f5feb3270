"""Renderings of a `Report`: terminal, JSON, JUnit XML and one HTML page. None of them imports a framework."""
