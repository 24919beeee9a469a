"""A node without hardware: NVML's library in Python, and what stands below it.

    boards    what kinds of GPUs there are
    node      the machine: its GPUs, its driver, and what can happen to them
    library   NVML's C functions, on a node
    spec      `--simulate ...` -> a node
    steer     `metagpu sim ...` -> things that happen to it

The real `metagpu.nvml` and the real pynvml run on top of it.
"""
