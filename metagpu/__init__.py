"""metagpu: a Kubernetes node agent that lets pods share NVIDIA GPUs.

`core` faces neither hardware nor Kubernetes, `backends` face the GPU, `plugins` face Kubernetes and
people, `sim` is a node without hardware. `docs/architecture.md` has the picture.
"""

__version__ = "0.1.0"
