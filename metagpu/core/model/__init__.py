"""Values and pure functions: GPUs, shares, leases, pods and snapshots.

No state, no I/O, no clock. `docs/glossary.md` explains the words.
"""
