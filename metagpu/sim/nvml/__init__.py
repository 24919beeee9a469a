"""NVML's C functions, in Python, on a simulated machine.

No policy and no state of GPUs.
"""
