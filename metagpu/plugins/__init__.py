"""The side of Kubernetes and people: kubelet, API server, metrics, sockets.

Only this package uses gRPC and protobuf, and here "device" is the kubelet's word for a share.
A plugin reads snapshots, applies facts and receives events; no plugin knows a backend by name,
NVML, or another plugin.
"""
