"""Measurements of the running daemon, side by side with their targets: `python -m bench`."""
