"""Helpers of tasks: back-off, rate limits, listeners, files, restarts.

Nothing here knows a GPU, a share or the configuration.
"""
