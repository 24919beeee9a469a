"""The backend `timeslice`: replicas of a GPU, and their placement.

The length of a time-slice is all that it changes on a GPU; it imports no other backend.
"""
