"""Measurements of the running daemon beside their targets: `python -m bench`."""
