"""The state of the daemon: facts, their reducer, events and the registry.

`Registry` is the only mutable cell. No I/O; the clock is in the facts.
"""
