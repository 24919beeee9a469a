"""What faces Kubernetes and people: the kubelet, PodResources, the control socket.

gRPC and protobuf live here and nowhere else; here "device" is the kubelet's word for a share.
Plugins read snapshots, apply facts, hear news; they know no backend by name and no NVML.
"""
