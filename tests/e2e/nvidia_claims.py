"""Manifests of NVIDIA's DRA driver, from its quickstart, written anew as facts."""

from collections.abc import Iterator
from contextlib import contextmanager

from tests.e2e.rig.kubectl import Document, Kubectl

NVIDIA = "gpu.nvidia.com"
"""NVIDIA's name of its driver, and of its class of whole GPUs."""
CLASSES = (NVIDIA, "mig.nvidia.com")


def gpu_config(sharing: Document, *requests: str) -> Document:
    """Return an entry of a claim's `config` with a GpuConfig."""
    made = {"apiVersion": "resource.nvidia.com/v1beta1", "kind": "GpuConfig", "sharing": sharing}
    return {"requests": list(requests), "opaque": {"driver": NVIDIA, "parameters": made}}


GPU_TEST5 = (
    gpu_config({"strategy": "TimeSlicing", "timeSlicingConfig": {"interval": "Long"}}, "ts-gpu"),
    gpu_config(
        {
            "strategy": "MPS",
            "mpsConfig": {
                "defaultActiveThreadPercentage": 50,
                "defaultPinnedDeviceMemoryLimit": "10Gi",
            },
        },
        "mps-gpu",
    ),
)
"""The `config` of the claim of gpu-test5: one GPU by time-slices, one by MPS."""


@contextmanager
def nvidia_classes(kubectl: Kubectl) -> Iterator[None]:
    """Create NVIDIA's DeviceClasses until the block ends."""
    kubectl.apply(*map(_device_class, CLASSES))
    try:
        yield
    finally:
        kubectl("delete", "deviceclass", *CLASSES)


def _device_class(name: str) -> Document:
    kind = name.partition(".")[0]
    of_type = f"device.attributes['{NVIDIA}'].type == '{kind}'"
    expression = f"device.driver == '{NVIDIA}' && {of_type}"
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "DeviceClass",
        "metadata": {"name": name},
        "spec": {"selectors": [{"cel": {"expression": expression}}]},
    }
