"""The endpoints of all offered resources, started and stopped as offers change.

The kubelet's numbers are compared with our lists. An open list proves little: a kubelet that
another plugin of the name has registered with and left counts none of our devices, and reads our
list on (docs/development/kubelet.md §1.4).
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import anyio
import structlog
from anyio import to_thread
from anyio.abc import TaskGroup
from grpclib.exceptions import GRPCError, StreamTerminatedError

from metagpu.core.availability.reasons import availability_of
from metagpu.core.contracts.backend import Backend
from metagpu.core.model.offers import Api
from metagpu.core.model.shares import ResourceName, ShareId
from metagpu.core.model.snapshot import Snapshot, once
from metagpu.core.runtime.rate_limit import Backoff
from metagpu.core.runtime.tasks import run_with_restart
from metagpu.core.state.call_stats import KubeletCallStats
from metagpu.core.state.facts import (
    CompetingPluginFound,
    CompetingPluginGone,
    RegistrationProblemFound,
    RegistrationProblemGone,
)
from metagpu.core.state.registry import Registry
from metagpu.plugins.kubelet.device_plugin import DevicePluginService
from metagpu.plugins.kubelet.directory import KubeletDirectory
from metagpu.plugins.kubelet.endpoint import NO_KUBELET, Endpoint, RegistrationClient
from metagpu.plugins.kubelet.fast_codec import decode_allocatable_response
from metagpu.plugins.kubelet.granting import EnsureCdiNames, no_cdi
from metagpu.plugins.kubelet.grpc_client import call_raw
from metagpu.plugins.kubelet.timing import TIMING, KubeletTiming

log = structlog.get_logger()

_ALLOCATABLE = "/v1.PodResourcesLister/GetAllocatableResources"


class RegistrationWatch:
    """Reports each resource that the kubelet lacks or counts otherwise.

    A resource that differs is registered again.

    Args:
        registry: has the offers, and receives the problems.
        record: knows which lists the kubelet reads.
        endpoints: the endpoints of all offers.
        pod_resources: the kubelet's PodResources socket, `None` to compare no numbers.
        timing: periods and delays.
    """

    def __init__(
        self,
        registry: Registry,
        record: KubeletCallStats,
        endpoints: Mapping[ResourceName, Endpoint],
        pod_resources: Path | None,
        timing: KubeletTiming = TIMING,
    ) -> None:
        self._registry = registry
        self._record = record
        self._endpoints = endpoints
        self._pod_resources = pod_resources
        self._timing = timing
        self._unlisted_since: dict[ResourceName, float] = {}
        self._differences: dict[ResourceName, str] = {}
        self._retries: dict[ResourceName, tuple[Backoff, float]] = {}

    async def run(self) -> None:
        """Watch until cancelled."""
        async with anyio.create_task_group() as group:
            group.start_soon(self._watch_lists)
            if self._pod_resources is not None:
                group.start_soon(self._compare_numbers, self._pod_resources)

    def forget(self, resource: ResourceName) -> None:
        """Drop everything about a resource that is no longer on offer."""
        for known in (self._unlisted_since, self._differences, self._retries):
            known.pop(resource, None)
        self._registry.apply(RegistrationProblemGone(resource))

    async def _watch_lists(self) -> None:
        while True:
            await anyio.sleep(self._timing.watch_period)
            now = anyio.current_time()
            for resource, endpoint in tuple(self._endpoints.items()):
                self._report(resource, self._judge_list(resource, endpoint, now))

    def _judge_list(self, resource: ResourceName, endpoint: Endpoint, now: float) -> str:
        """Return the problem of a resource, empty for none; end a hanging attempt."""
        competing = resource in self._registry.snapshot.competing_plugins
        if self._record.of_resource(resource).listed or competing:
            self._unlisted_since.pop(resource, None)
            return self._differences.get(resource, "")

        lasts = now - self._unlisted_since.setdefault(resource, now)
        if lasts < self._timing.unlisted:
            return self._registry.snapshot.registration_problems.get(resource, "")
        waited = now - endpoint.since
        if waited >= self._timing.longest_attempt and endpoint.waits_for != NO_KUBELET:
            endpoint.register_again(f"for {waited:.0f} s it waited for {endpoint.waits_for}")
        reason = endpoint.problem or f"metagpu waits for {endpoint.waits_for}"
        return f"the kubelet does not read its list: {reason}"

    async def _compare_numbers(self, socket: Path) -> None:
        """Compare the kubelet's healthy devices with our lists.

        A list that was just sent may not have arrived, and a busy kubelet reads them late: a
        difference counts when it is seen twice, and the kubelet counts the same shares both times.
        """
        suspected: Mapping[ResourceName, frozenset[str]] = {}
        while True:
            timing = self._timing
            await anyio.sleep(timing.comparison_retry if suspected else timing.comparison_period)
            found = await self._find_differences(socket)
            if found is None:
                continue
            for resource in self._endpoints.keys() - found.keys():
                self._differences.pop(resource, None)
                self._retries.pop(resource, None)
            for resource, theirs in found.items():
                if suspected.get(resource) != theirs:
                    continue
                problem = (
                    f"the kubelet counts {len(theirs)} shares as allocatable, and metagpu lists "
                    f"{len(self._healthy().get(resource, ()))}; another plugin may have registered "
                    "the name"
                )
                self._differences[resource] = problem
                self._report(resource, problem)
                self._register_again(resource, problem)
            suspected = found

    async def _find_differences(self, socket: Path) -> Mapping[ResourceName, frozenset[str]] | None:
        """Return what the kubelet counts where our list differs; `None` if unknown."""
        before = self._healthy()
        try:
            answer = await call_raw(socket, _ALLOCATABLE, b"", self._timing.poll_deadline)
            counted = await to_thread.run_sync(decode_allocatable_response, answer)
        except (OSError, GRPCError, StreamTerminatedError, ValueError):
            return None  # the watch of leases reports a PodResources service that fails
        return {
            resource: theirs
            for resource, ours in self._healthy().items()
            if ours == before.get(resource)
            and (theirs := counted.get(resource, frozenset[str]())) != ours
        }

    def _healthy(self) -> Mapping[ResourceName, frozenset[ShareId]]:
        """Return the shares that our open lists have as Healthy."""
        healthy = _healthy_shares(self._registry.snapshot)
        return {
            resource: healthy.get(resource, frozenset())
            for resource in self._endpoints
            if self._record.of_resource(resource).listed
        }

    def _register_again(self, resource: ResourceName, problem: str) -> None:
        """Register a resource again, later and later: another plugin may do the same."""
        now, timing = anyio.current_time(), self._timing
        fresh = Backoff(timing.comparison_period, timing.longest_comparison_delay), now
        backoff, due = self._retries.setdefault(resource, fresh)
        if now >= due:
            self._retries[resource] = backoff, now + backoff.next()
            self._endpoints[resource].register_again(problem)

    def _report(self, resource: ResourceName, problem: str) -> None:
        if not problem:
            if self._registry.apply(RegistrationProblemGone(resource)):
                log.info("resource at the kubelet again", resource=resource)
        elif self._registry.apply(RegistrationProblemFound(resource, problem)):
            log.error("resource not at the kubelet", resource=resource, problem=problem)


@once
def _healthy_shares(snapshot: Snapshot) -> Mapping[ResourceName, frozenset[ShareId]]:
    unlisted = {gpu: availability_of(state).unlisted for gpu, state in snapshot.gpus.items()}
    return {
        resource: frozenset(
            share.id
            for gpu, shares in offer.by_gpu.items()
            for share in shares
            if share.id not in unlisted[gpu]
        )
        for resource, offer in snapshot.offers.items()
    }


async def serve_offers(
    registry: Registry,
    directory: KubeletDirectory,
    backend: Callable[[ResourceName], Backend],
    record: KubeletCallStats | None = None,
    *,
    ensure_cdi_names: EnsureCdiNames = no_cdi,
    pod_resources: Path | None = None,
    timing: KubeletTiming = TIMING,
) -> None:
    """Serve and register all resources of the device plugin API, until cancelled.

    A resource that stays on offer is not touched when others come or go.

    Args:
        registry: has the offers.
        directory: the kubelet's folder.
        backend: finds the backend of a resource.
        record: counts calls and registrations; one of its own unless given.
        ensure_cdi_names: makes the CDI names of an answer known to the container runtime.
        pod_resources: the kubelet's PodResources socket, which says what the kubelet counts.
        timing: deadlines and delays.
    """
    record = record or KubeletCallStats()
    endpoints: dict[ResourceName, Endpoint] = {}
    scopes: dict[ResourceName, anyio.CancelScope] = {}
    # A name that is offered again waits for its old endpoint: the end of an old list would make
    # the kubelet drop the new registration.
    serving = defaultdict[ResourceName, anyio.Lock](anyio.Lock)
    client = RegistrationClient(directory, timing)
    watch = RegistrationWatch(registry, record, endpoints, pod_resources, timing)

    async with anyio.create_task_group() as group:
        group.start_soon(directory.watch)
        group.start_soon(directory.remove_dead_sockets)
        group.start_soon(partial(run_with_restart, watch.run, "watch of registrations"))

        async for resources in registry.watch(
            lambda snapshot: tuple(snapshot.offers_of(Api.DEVICE_PLUGIN))
        ):
            for resource in endpoints.keys() - set(resources):
                del endpoints[resource]
                scopes.pop(resource).cancel()
                watch.forget(resource)
                _apply_competitor(registry, resource, None)
            for resource in resources:
                if resource not in endpoints:
                    service = DevicePluginService(
                        resource,
                        registry,
                        backend,
                        ensure_cdi_names=ensure_cdi_names,
                        record=record.of_resource(resource),
                        timing=timing,
                    )
                    on_competitor = partial(_apply_competitor, registry, resource)
                    endpoint = Endpoint(
                        service,
                        directory,
                        client,
                        on_competitor,
                        record,
                        timing=timing,
                    )
                    endpoints[resource] = endpoint
                    scopes[resource] = _start(group, endpoint, resource, serving[resource], timing)


def _apply_competitor(registry: Registry, resource: ResourceName, socket: Path | None) -> None:
    registry.apply(
        CompetingPluginGone(resource)
        if socket is None
        else CompetingPluginFound(resource, str(socket))
    )


def _start(
    group: TaskGroup,
    endpoint: Endpoint,
    resource: ResourceName,
    serving: anyio.Lock,
    timing: KubeletTiming,
) -> anyio.CancelScope:
    scope = anyio.CancelScope()

    async def run() -> None:
        with scope:
            async with serving:
                name, delay = f"endpoint of {resource}", timing.refusal_delay
                await run_with_restart(endpoint.run, name, delay=delay)

    group.start_soon(run)
    return scope
