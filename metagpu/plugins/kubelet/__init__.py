"""The kubelet's side: device plugins, registration, PodResources, checkpoint.

Only this package, and the simulated kubelet, speaks gRPC. No GPU is touched here.
"""
