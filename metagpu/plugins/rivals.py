"""Other device plugins of this node that serve a resource of ours, known by their sockets.

The kubelet keeps the one that registers last, and tells the other nothing but the end of its list:
two that register again each time would take the resource from each other for ever.
"""

from base64 import b64encode
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import anyio

from metagpu.plugins.serving import identity_of

_NVIDIA: Final = "nvidia.com/"
_GPU: Final = "nvidia.com/gpu"
_GKE: Final = "nvidiaGPU-*.sock"


async def rival_of(folder: Path, resource: str) -> Path | None:
    """Find the socket of another plugin that serves a resource; `None` if nobody listens there.

    A file that was left behind is no rival.
    """
    async for path in _sockets(folder, resource):
        if identity_of(path) is None:
            continue
        try:
            stream = await anyio.connect_unix(path)
        except OSError:
            continue
        await stream.aclose()
        return path
    return None


async def _sockets(folder: Path, resource: str) -> AsyncIterator[Path]:
    """Give where other plugins would serve a resource.

    NVIDIA's, alone, in the GPU operator or in HAMi, serves `nvidia.com/NAME` on `nvidia-NAME.sock`;
    GKE's serves `nvidia.com/gpu` on a socket that is called by the time of its start; cnvrg's
    MetaGPU serves any name on a socket that is called by it in base64.
    """
    if resource.startswith(_NVIDIA):
        yield folder / f"nvidia-{resource.removeprefix(_NVIDIA)}.sock"
    if resource == _GPU:
        async for path in anyio.Path(folder).glob(_GKE):
            yield Path(path)
    encoded = b64encode(resource.encode()).decode()
    if "/" not in encoded:  # such a file cannot be
        yield folder / encoded
