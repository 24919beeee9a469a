"""GPUs whose slices the API server refuses, and the dry runs that ask about them."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

import anyio
import structlog

from metagpu.core.devices.devices import pool_name
from metagpu.core.devices.slices import GpuSlices, SliceSpec, pools_of
from metagpu.core.errors import ClusterError
from metagpu.core.model.gpu import GpuId
from metagpu.plugins.cluster.node_object import KubeObject
from metagpu.plugins.cluster.reconciler import backoff_of
from metagpu.plugins.cluster.resource_slices import (
    SLICES,
    gpu_of_slice,
    named,
    pool_of,
    probe_of,
    slice_object,
)

if TYPE_CHECKING:
    from metagpu.plugins.cluster.client import KubeClient

_INVALID: Final = 422

log = structlog.get_logger()


class SliceRefusals:
    """The GPUs that the pool of a node leaves out.

    Attributes:
        problems: the API server's answers.
    """

    def __init__(self, client: "KubeClient", node: str, driver: Callable[[], str]) -> None:
        self.problems: dict[GpuId, str] = {}
        self._client = client
        self._node = node
        self._driver = driver
        self._backoff = backoff_of(client.timing)
        self._ask_at = 0.0

    def wait(self) -> float | None:
        """Return the seconds until `ask` asks again, `None` without a refused GPU."""
        if self.problems:
            return max(0.0, self._ask_at - anyio.current_time())
        self._backoff.reset()
        return None

    def note(self, wanted: KubeObject, error: ClusterError) -> None:
        """Leave a GPU out if its slice is not valid."""
        if error.status != _INVALID or pool_of(wanted) != pool_name(self._node):
            return
        if (gpu := gpu_of_slice(wanted)) not in self.problems:
            log.warning("resource slices of a gpu refused", gpu=gpu, error=str(error))
            self._ask_at = anyio.current_time() + self._backoff.next()
        self.problems[gpu] = str(error)

    async def ask(self, found: Mapping[GpuId, GpuSlices | None], node: KubeObject) -> None:
        """Find out which refused GPUs have slices now that the API server takes."""
        for gpu in list(self.problems):
            if found.get(gpu) is None:
                del self.problems[gpu]
        if self.problems and anyio.current_time() >= self._ask_at:
            for gpu in list(self.problems):
                if await self.is_taken(found[gpu], node):
                    del self.problems[gpu]
            self._ask_at = anyio.current_time() + self._backoff.next()

    async def is_taken(self, slices: GpuSlices | None, node: KubeObject) -> bool:
        """Return whether the API server takes the slices of a GPU."""
        pools = pools_of([slices] if slices else [], self._node, self._driver())
        try:
            await self.try_slices(pools.get(pool_name(self._node), ()), node)
        except ClusterError:
            return False
        return True

    async def try_slices(self, specs: Sequence[SliceSpec], node: KubeObject) -> None:
        """Send slices by a dry run.

        Raises:
            ClusterError: the API server does not take one.
        """
        for name, spec in named(specs).items():
            body = probe_of(slice_object(name, spec, 1, node))
            try:
                await self._client.call("POST", SLICES, query={"dryRun": "All"}, body=body)
            except ClusterError as error:
                self.note(body, error)
                raise
