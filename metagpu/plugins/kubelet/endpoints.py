"""The endpoints of all offered resources, started and stopped as offers change."""

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path

import anyio
from anyio.abc import TaskGroup

from metagpu.core.contracts.backend import Backend
from metagpu.core.model.offers import Api
from metagpu.core.model.shares import ResourceName
from metagpu.core.runtime.tasks import run_with_restart
from metagpu.core.state.call_stats import KubeletCallStats
from metagpu.core.state.facts import CompetingPluginFound, CompetingPluginGone
from metagpu.core.state.registry import Registry
from metagpu.plugins.kubelet.device_plugin import DevicePluginService
from metagpu.plugins.kubelet.directory import KubeletDirectory
from metagpu.plugins.kubelet.endpoint import Endpoint
from metagpu.plugins.kubelet.granting import EnsureCdiNames, no_cdi
from metagpu.plugins.kubelet.registration import RegistrationClient
from metagpu.plugins.kubelet.registration_watch import RegistrationWatch
from metagpu.plugins.kubelet.timing import TIMING, KubeletTiming


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
