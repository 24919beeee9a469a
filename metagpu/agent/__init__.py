"""The composition root, which builds one node's agent of all other packages.

Decisions and protocols do not belong here; they stand in `core`, `backends` and `plugins`.
"""
