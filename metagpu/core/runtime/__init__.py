"""Helpers of tasks: back-off, rate limits, listeners, event bus, restarts.

Nothing here knows a GPU, a share or the configuration.
"""
