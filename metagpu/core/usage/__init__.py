"""GPU memory and utilization of containers: accounting, enforcement and reports.

The package reads processes through the contracts `Driver` and `Host`; nothing here reads `/proc`,
calls NVML, or talks to Kubernetes.
"""
