"""The decisions of metagpu: values, one registry, contracts for GPUs and backends.

Nothing here knows NVML, gRPC or Kubernetes. The packages import only downwards; the order is in
`pyproject.toml`, and `make lint` checks it.
"""
