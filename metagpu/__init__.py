"""metagpu: a Kubernetes node agent that lets pods share NVIDIA GPUs.

`core` faces neither hardware nor Kubernetes, `backends` face the GPU, `plugins` face Kubernetes and
people, `sim` is a node without hardware. `docs/architecture.md` has the picture.
"""

import sys

__version__ = "0.1.0"

# structlog loads rich, where it is installed, to draw tracebacks with. No log of ours does, and the
# agent would start 50 ms later and stay 5 MB larger for it.
if "rich" not in sys.modules:
    sys.modules["rich"] = None  # type: ignore[assignment]  # how Python is told: there is none
    try:
        import structlog as _  # noqa: F401
    finally:
        del sys.modules["rich"]
