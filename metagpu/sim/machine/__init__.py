"""The simulated machine: GPUs, driver, MIG, processes and host programs.

Nothing here knows NVML's C interface.
"""
