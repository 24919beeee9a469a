"""Refused ResourceClaims: the kubelet tries again once the reason has ended.

By itself the kubelet repeats a refused call only after 60 to 90 s; a change of the pod makes it
do so at once. So the pods of the claim get an annotation: once the GPUs show that the reason has
ended, and after a back-off where nothing would show it. The kubelet refuses by itself what comes
while it has no driver: during a start of either, and while it registers the driver a second time.
"""

import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from typing import Any, Final

import anyio
import structlog
from anyio.abc import TaskGroup

from metagpu.core.errors import ClusterError
from metagpu.core.model.shares import ResourceClaimRef
from metagpu.core.runtime.rate_limit import Backoff, LogOnce
from metagpu.core.state.events import LayoutApplied
from metagpu.core.state.registry import Registry
from metagpu.plugins.dra.preparer import ClaimPreparer

ANNOTATION: Final = "metagpu.io/prepare-again"
_REST: Final = 1.0
"""Seconds between two rounds: a GPU whose state flaps must not have pods patched all the time."""
_LONGEST_REST: Final = 15.0
"""The longest delay between two reads of pods that fail, in seconds."""
_KUBELET_RETRY: Final = 90.0
"""Seconds after which the kubelet has repeated a refused call by itself."""

AnnotatePod = Callable[[str, str, str, str], Awaitable[object]]
"""Sets an annotation of a pod: namespace, name, key, value; raises ClusterError if it cannot."""
ReadPendingPods = Callable[[], Awaitable[Iterable[Mapping[str, Any]]]]
"""Reads the node's pods of the phase Pending from the API server; raises ClusterError."""

log = structlog.get_logger()


class PreparationRetries:
    """Has refused claims prepared again as soon as they can be.

    Args:
        registry: has the state of the GPUs.
        preparer: knows the refused claims.
        annotate: annotates pods at the API server.
        read_pending: reads the pods that wait on this node.
        rest: seconds between two rounds.
    """

    def __init__(
        self,
        registry: Registry,
        preparer: ClaimPreparer,
        annotate: AnnotatePod,
        read_pending: ReadPendingPods,
        rest: float = _REST,
    ) -> None:
        self._registry = registry
        self._preparer = preparer
        self._annotate = annotate
        self._read_pending = read_pending
        self._rest = rest
        self._failures = LogOnce()
        self._registered = anyio.Event()

    def note_registered(self) -> None:
        """Note that the kubelet has the driver: pods may have been refused before."""
        self._registered.set()

    async def run(self) -> None:
        """Watch GPUs, reloads, registrations and failed claims until cancelled."""
        async with anyio.create_task_group() as group:
            group.start_soon(self._follow_registrations)
            group.start_soon(self._follow_layouts)
            group.start_soon(self._follow_failures, group)
            await self._follow_gpus()

    async def _follow_registrations(self) -> None:
        """Annotate the pods that the kubelet refused without asking the driver."""
        while True:
            await self._registered.wait()
            self._registered = anyio.Event()
            annotated: set[tuple[str, str]] = set()
            backoff = Backoff(first=self._rest, longest=_LONGEST_REST, jitter=True)
            with anyio.move_on_after(_KUBELET_RETRY):
                while not await self._annotate_pending(annotated):  # noqa: ASYNC110 - it asks
                    await anyio.sleep(backoff.next())
            await anyio.sleep(self._rest)

    async def _annotate_pending(self, annotated: set[tuple[str, str]]) -> bool:
        """Annotate pods with claims that are not prepared; return whether all were read."""
        try:
            for pod in await self._read_pending():
                key = pod["metadata"]["namespace"], pod["metadata"]["name"]
                if key not in annotated:
                    await self._annotate_unprepared(pod)
                    annotated.add(key)
        except ClusterError as error:
            if self._failures.is_new("pending", str(error)):
                log.warning(
                    "pending pods not read",
                    error=str(error),
                    effect="they are read again; by itself the kubelet prepares within 90 s",
                )
            return False
        self._failures.clear("pending")
        return True

    async def _annotate_unprepared(self, pod: Mapping[str, Any]) -> None:
        metadata = pod["metadata"]
        for name in claim_names(pod):
            found = await self._preparer.find_unprepared(metadata["namespace"], name)
            if found is not None:
                await self._annotate_pod(found[0], metadata["name"])
                return

    async def _follow_layouts(self) -> None:
        """Retry after a reload: another option of a backend changes no GPU."""
        with self._registry.events.subscribe(LayoutApplied) as events:
            async for _ in events:
                await self._retry()

    async def _follow_gpus(self) -> None:
        """Watch the GPUs while there are refused claims."""
        refused = self._preparer.states.refused
        async for states in self._registry.watch(lambda now: now.gpus if refused else None):
            if states is not None and await self._retry():
                await anyio.sleep(self._rest)

    async def _follow_failures(self, group: TaskGroup) -> None:
        """Annotate the pods of claims that failed, each after its back-off."""
        while True:
            # A request may last until its deadline: the next claim does not wait for it.
            group.start_soon(self._retry_failed, await self._preparer.states.failed.wait_due())

    async def _retry_failed(self, claim: ResourceClaimRef) -> None:
        """Annotate the pods of a claim, unless it is prepared or unprepared meanwhile."""
        failed = self._preparer.states.failed
        try:
            found = await self._preparer.find_unprepared(claim.namespace, claim.name)
        except ClusterError:
            if claim in failed:
                failed.note(claim)
            return
        if found is None or found[0] != claim or claim not in failed:
            failed.forget(claim)
            return
        for pod in found[1].pods:  # each has a back-off of its own at the kubelet
            await self._annotate_pod(claim, pod)

    async def _retry(self) -> bool:
        """Annotate the pods of claims that can be prepared; return whether there are some."""
        ready = [
            refs
            for refs in self._preparer.states.refused.items()
            if self._preparer.can_prepare(*refs)
        ]
        for claim, allocation in ready:
            if self._preparer.states.refused.pop(claim, None) is None:
                continue  # the kubelet was faster: the API server may take seconds for a pod
            for pod in allocation.pods:
                await self._annotate_pod(claim, pod)
        return bool(ready)

    async def _annotate_pod(self, claim: ResourceClaimRef, pod: str) -> None:
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
            log.info("pod annotated, its claim is prepared again", claim=str(claim), pod=pod)


def claim_names(pod: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of the ResourceClaims of a pod that have been made."""
    status = pod.get("status", {})
    for claim in (*pod["spec"].get("resourceClaims", ()), *status.get("resourceClaimStatuses", ())):
        if name := claim.get("resourceClaimName"):
            yield name
    if extended := status.get("extendedResourceClaimStatus"):
        yield extended["resourceClaimName"]
