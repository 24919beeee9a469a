"""Health of GPUs and MIG devices: from XIDs, memory errors and checks to verdicts.

Rules are pure; the watch applies verdicts to the registry. Nothing here calls NVML but through the
contract `Driver`.
"""
