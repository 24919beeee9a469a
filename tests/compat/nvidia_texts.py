"""Files of NVIDIA's device plugin and mig-parted, and the GPUs that they name."""

from typing import Final

from tests.backends.mig.gpus import mig_gpu
from tests.compat.rig import FILES
from tests.rigs.build import gpu

FOUR: Final = [gpu(n) for n in range(4)]
MIG_FOUR: Final = [mig_gpu(n) for n in range(4)]
SLICES: Final = """\
version: v1
sharing:
  timeSlicing:
    resources:
    - name: nvidia.com/gpu
      replicas: 4
"""


def slices(more: str = "", *, way: str = "timeSlicing", head: str = "") -> str:
    """Write a file that shares GPUs; `more` are further keys of its one resource."""
    return f"""\
version: v1
sharing:
  {way}:
{head}    resources:
    - name: nvidia.com/gpu
      replicas: 4
{more}"""


LAYOUT: Final = (FILES / "nvidia-mig-config.yaml").read_text(encoding="utf-8")
SEVEN: Final = """\
version: v1
mig-configs:
  7x1g.5gb:
  - {devices: all, mig-enabled: true, mig-devices: {1g.5gb: 7}}
"""


def mixed(strategy: str) -> str:
    """Write a file of the device plugin with this strategy for MIG."""
    return f"version: v1\nflags: {{migStrategy: {strategy}}}\n"
