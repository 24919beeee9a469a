"""The adapter to Linux: /proc, cgroups, signals, device nodes, host programs.

Only this package starts programs and signals processes. No NVML and no Kubernetes API here.
"""
