"""The error of the simulated allocation."""


class AllocationError(Exception):
    """Raised for a claim or selector that the scheduler refuses; the text states why."""
