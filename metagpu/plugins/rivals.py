"""Other device plugins of this node that serve a resource of ours, known by their sockets.

The kubelet keeps the one that registers last, and tells the other nothing but the end of its list:
two that register again each time would take the resource from each other for ever.
"""

from pathlib import Path
from typing import Final

import anyio

from metagpu.plugins.serving import identity_of

_NVIDIA: Final = "nvidia.com/"


async def rival_of(folder: Path, resource: str) -> Path | None:
    """Find the socket of another plugin that serves a resource; `None` if nobody listens there.

    NVIDIA's device plugin, alone, in the GPU operator or in HAMi, serves `nvidia.com/NAME` on
    `nvidia-NAME.sock`. A file that was left behind is no rival.
    """
    if not resource.startswith(_NVIDIA):
        return None
    path = folder / f"nvidia-{resource.removeprefix(_NVIDIA)}.sock"
    if identity_of(path) is None:
        return None

    try:
        stream = await anyio.connect_unix(path)
    except OSError:
        return None
    await stream.aclose()
    return path
