"""Manifests of NVIDIA's DRA driver, from its quickstart, written anew as facts."""

from collections.abc import Iterator
from contextlib import contextmanager

import yaml

from tests.e2e.rig.kubectl import Document, Kubectl
from tests.e2e.rig.tools import REPOSITORY

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


QUICKSTART = """
apiVersion: resource.k8s.io/v1
kind: ResourceClaimTemplate
metadata: {name: single-gpu}
spec: {spec: {devices: {requests: [{name: gpu, exactly: {deviceClassName: gpu.nvidia.com}}]}}}
---
apiVersion: resource.k8s.io/v1
kind: ResourceClaim
metadata: {name: single-gpu}
spec: {devices: {requests: [{name: gpu, exactly: {deviceClassName: gpu.nvidia.com}}]}}
---
apiVersion: resource.k8s.io/v1
kind: ResourceClaimTemplate
metadata: {name: mig-devices}
spec:
  spec:
    devices:
      requests:
        - name: mig-1g-5gb-0
          exactly:
            deviceClassName: mig.nvidia.com
            selectors:
              - cel: {expression: "device.attributes['gpu.nvidia.com'].profile == '1g.5gb'"}
        - name: mig-1g-5gb-1
          exactly:
            deviceClassName: mig.nvidia.com
            selectors:
              - cel: {expression: "device.attributes['gpu.nvidia.com'].profile == '1g.5gb'"}
        - name: mig-2g-10gb
          exactly:
            deviceClassName: mig.nvidia.com
            selectors:
              - cel: {expression: "device.attributes['gpu.nvidia.com'].profile == '2g.10gb'"}
        - name: mig-3g-20gb
          exactly:
            deviceClassName: mig.nvidia.com
            selectors:
              - cel: {expression: "device.attributes['gpu.nvidia.com'].profile == '3g.20gb'"}
      constraints: [{requests: [], matchAttribute: gpu.nvidia.com/parentUUID}]
---
apiVersion: v1
kind: Pod
metadata: {name: gpu-test1-pod1}
spec:
  containers: [{name: ctr, resources: {claims: [{name: gpu}]}}]
  resourceClaims: [{name: gpu, resourceClaimTemplateName: single-gpu}]
  tolerations: [{key: nvidia.com/gpu, operator: Exists, effect: NoSchedule}]
---
apiVersion: v1
kind: Pod
metadata: {name: gpu-test1-pod2}
spec:
  containers: [{name: ctr, resources: {claims: [{name: gpu}]}}]
  resourceClaims: [{name: gpu, resourceClaimTemplateName: single-gpu}]
---
apiVersion: v1
kind: Pod
metadata: {name: gpu-test2}
spec:
  containers:
    - {name: ctr0, resources: {claims: [{name: shared-gpu}]}}
    - {name: ctr1, resources: {claims: [{name: shared-gpu}]}}
  resourceClaims: [{name: shared-gpu, resourceClaimTemplateName: single-gpu}]
---
apiVersion: v1
kind: Pod
metadata: {name: gpu-test3-pod1}
spec:
  containers: [{name: ctr, resources: {claims: [{name: shared-gpu}]}}]
  resourceClaims: [{name: shared-gpu, resourceClaimName: single-gpu}]
---
apiVersion: v1
kind: Pod
metadata: {name: gpu-test3-pod2}
spec:
  containers: [{name: ctr, resources: {claims: [{name: shared-gpu}]}}]
  resourceClaims: [{name: shared-gpu, resourceClaimName: single-gpu}]
---
apiVersion: v1
kind: Pod
metadata: {name: gpu-test4}
spec:
  containers:
    - {name: ctr0, resources: {claims: [{name: mig-devices, request: mig-1g-5gb-0}]}}
    - {name: ctr1, resources: {claims: [{name: mig-devices, request: mig-1g-5gb-1}]}}
    - {name: ctr2, resources: {claims: [{name: mig-devices, request: mig-2g-10gb}]}}
    - {name: ctr3, resources: {claims: [{name: mig-devices, request: mig-3g-20gb}]}}
  resourceClaims: [{name: mig-devices, resourceClaimTemplateName: mig-devices}]
"""
"""gpu-test1 to gpu-test4; the last as a pod, of which NVIDIA has a Deployment."""


@contextmanager
def nvidia_classes(kubectl: Kubectl) -> Iterator[None]:
    """Create NVIDIA's DeviceClasses, and policies for its driver's name, until the block ends."""
    kubectl.apply(*map(_device_class, CLASSES), *_policies(NVIDIA))
    try:
        yield
    finally:
        kubectl("delete", "deviceclass", *CLASSES)
        kubectl.apply(*_policies("gpu.metagpu.io"))


def _policies(driver: str) -> list[Document]:
    """Return the policies of deploy/dra.yaml for a driver's name."""
    text = (REPOSITORY / "deploy" / "dra.yaml").read_text()
    documents = yaml.safe_load_all(text.replace("'gpu.metagpu.io'", f"'{driver}'"))
    return [document for document in documents if document["kind"] == "ValidatingAdmissionPolicy"]


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
