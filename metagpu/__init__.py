"""metagpu: a Kubernetes node agent that lets pods share NVIDIA GPUs.

`backends` share the GPUs, `plugins` serve Kubernetes and people, `core` knows neither, `sim` is a
node without hardware. `docs/architecture.md` has the picture.
"""

__version__ = "0.1.0"
