"""The built-in backends, one package for each way of sharing a GPU.

A backend may import `core` and `backends.common`, and no other backend. It knows no gRPC, and NVML
only through `core.contracts`.
"""
