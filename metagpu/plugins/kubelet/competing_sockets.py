"""Sockets of competing device plugins, which serve a resource of ours.

The kubelet keeps the plugin that registers last, and only ends the list of the other. Two plugins
that register again each time would take the resource from each other for ever.
"""

from base64 import b64encode
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import anyio

from metagpu.core.runtime.files import file_identity
from metagpu.plugins.kubelet.directory import KubeletDirectory

_NVIDIA: Final = "nvidia.com/"
_GPU: Final = "nvidia.com/gpu"
_GKE: Final = "nvidiaGPU-*.sock"


async def find_competing_socket(directory: KubeletDirectory, resource: str) -> Path | None:
    """Return the socket of another plugin that serves a resource; `None` without one.

    A file without a listener, left behind by a plugin that ended, does not count.
    """
    async for path in _candidates(directory, resource):
        if file_identity(path) is None:
            continue
        try:
            stream = await anyio.connect_unix(path)
        except OSError:
            continue
        await stream.aclose()
        return path
    return None


async def _candidates(directory: KubeletDirectory, resource: str) -> AsyncIterator[Path]:
    """Yield the paths at which other plugins would serve a resource.

    - NVIDIA's plugin, alone, in the GPU operator or in HAMi: `nvidia.com/NAME` on
      `nvidia-NAME.sock`.
    - GKE's plugin: `nvidia.com/gpu` on a socket named after the plugin's start time.
    - cnvrg's MetaGPU: any resource, on a socket named after the resource in base64.
    - another daemon of metagpu, of a version that does not lock the folder.
    """
    folder = directory.path
    if resource.startswith(_NVIDIA):
        yield folder / f"nvidia-{resource.removeprefix(_NVIDIA)}.sock"
    if resource == _GPU:
        async for path in anyio.Path(folder).glob(_GKE):
            yield Path(path)
    encoded = b64encode(resource.encode()).decode()
    if "/" not in encoded:  # no file name has a slash
        yield folder / encoded
    for other in await directory.find_sockets_of_others(resource):
        yield other
