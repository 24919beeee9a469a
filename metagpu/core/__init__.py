"""The decisions: values, one registry, contracts for GPUs and for ways of cutting them.

Nothing here knows NVML, gRPC or Kubernetes. Inside, modules import only downwards; the order is in
`pyproject.toml` and `make lint` checks it.
"""
