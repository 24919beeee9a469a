"""Reports on the node as plain data: its status, and the checks of the doctor.

The package reads the snapshots and facts that callers pass; nothing here asks the node.
"""
