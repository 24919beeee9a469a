"""The backend `mig`: MIG instances, created on demand or as a fixed layout.

Decisions (profiles, placement, planner, inventories) are pure; only the reconciler, the
provisioner, the mode and the MPS daemons act, through `GpuContext` and never through NVML itself.
"""
