"""A small API server for tests and the demo: objects, watches and faults.

No controllers, except for Node Feature Discovery's labels.
"""
