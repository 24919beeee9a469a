"""Helpers of tasks: the loop, back-off, rate limits, listeners, files, restarts.

Nothing here knows a GPU, a share or the configuration.
"""
