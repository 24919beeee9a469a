"""Refused ResourceClaims: the kubelet tries again once the reason has ended.

By itself the kubelet repeats a refused call only after 60 to 90 s; a change of the pod makes it
do so at once. So the pods of the claim get an annotation.
"""

import time
from collections.abc import Awaitable, Callable
from typing import Final

import anyio
import structlog

from metagpu.core.errors import ClusterError
from metagpu.core.runtime.log_once import LogOnce
from metagpu.core.state.registry import Registry
from metagpu.plugins.dra.preparer import ClaimPreparer

ANNOTATION: Final = "metagpu.io/prepare-again"
_REST: Final = 1.0
"""Seconds between two rounds: a GPU whose state flaps must not have pods patched all the time."""

AnnotatePod = Callable[[str, str, str, str], Awaitable[object]]
"""Sets an annotation of a pod: namespace, name, key, value; raises ClusterError if it cannot."""

log = structlog.get_logger()


class PreparationRetries:
    """Has refused claims prepared again as soon as they can be.

    Args:
        registry: has the state of the GPUs.
        preparer: knows the refused claims.
        annotate: annotates pods at the API server.
        rest: seconds between two rounds.
    """

    def __init__(
        self,
        registry: Registry,
        preparer: ClaimPreparer,
        annotate: AnnotatePod,
        rest: float = _REST,
    ) -> None:
        self._registry = registry
        self._preparer = preparer
        self._annotate = annotate
        self._rest = rest
        self._failures = LogOnce()

    async def run(self) -> None:
        """Watch the GPUs until cancelled, while there are refused claims."""
        refused = self._preparer.refused
        async for states in self._registry.watch(lambda now: now.gpus if refused else None):
            if states is not None and await self._retry():
                await anyio.sleep(self._rest)

    async def _retry(self) -> bool:
        """Annotate the pods of claims that can be prepared; return whether there are some."""
        ready = [it for it in self._preparer.refused.items() if self._preparer.can_prepare(*it)]
        for claim, allocation in ready:
            if self._preparer.refused.pop(claim, None) is None:
                continue  # the kubelet was faster: the API server may take seconds for a pod
            for pod in allocation.pods:
                try:
                    await self._annotate(claim.namespace, pod, ANNOTATION, f"{time.time():.3f}")
                except ClusterError as error:
                    if self._failures.is_new(ANNOTATION, str(error)):
                        log.warning(
                            "pod not annotated",
                            pod=f"{claim.namespace}/{pod}",
                            error=str(error),
                            effect="the kubelet prepares its claim by itself within 90 s",
                        )
                else:
                    log.info("claim can be prepared", claim=str(claim), pod=pod)
        return bool(ready)
