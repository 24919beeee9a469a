"""The CDI specification of GPUs for monitoring, by claims with `adminAccess`.

A container with such a name can ask NVML about the GPU, and has no device node to compute with.
There is no file without such a claim.
"""

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from metagpu.core.grants import cdi
from metagpu.core.grants.injection import NO_DEVICES, VISIBLE_DEVICES, Injection
from metagpu.core.model.gpu import Gpu, GpuId
from metagpu.core.runtime.files import replace_text


class MonitorFile:
    """The writer of the file.

    Attributes:
        wanted: whether a claim looks at a GPU of it.
        names: the GPUs that are in it.
    """

    def __init__(self, folder: Path | None) -> None:
        self.wanted = False
        self.names = frozenset[GpuId]()
        self._path = folder / cdi.MONITOR_FILE if folder is not None else None

    def replace(self, gpus: Iterable[Gpu], injection: Injection, edits: cdi.ContainerEdits) -> None:
        """Write the file for GPUs that have their device nodes, if it is wanted. Blocks.

        Raises:
            OSError: the file cannot be written.
        """
        if not self.wanted or self._path is None:
            return
        named = {str(it.id): nodes for it in gpus if (nodes := injection.monitor_nodes(it))}
        self.names = frozenset(map(GpuId, named))
        if not named:
            self._path.unlink(missing_ok=True)
            return
        variables = {VISIBLE_DEVICES: NO_DEVICES}
        text = cdi.build_monitor_spec(named, injection.monitor_common_nodes(), edits, variables)
        if not self._path.exists() or self._path.read_text() != text:
            replace_text(self._path, text)

    def remove(self) -> None:
        """Remove the file, unless it is wanted again meanwhile. Blocks."""
        self.names = frozenset()
        if self._path is not None and not self.wanted:
            with suppress(OSError):  # it harms nobody: no container names its devices any more
                self._path.unlink(missing_ok=True)
