"""The adapter to NVIDIA's NVML, behind `core.contracts.driver.Driver`.

Only this package, and the simulated library, imports pynvml. No decision is taken here.
"""
