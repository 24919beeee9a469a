"""Every resource on offer at the kubelet: one endpoint each, started and ended as offers change."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import anyio
from anyio.abc import TaskGroup

from metagpu.core.backend import Backend
from metagpu.core.facts import RivalLeft, RivalMet
from metagpu.core.model import ResourceName
from metagpu.core.registry import Registry
from metagpu.plugins.endpoint import Endpoint
from metagpu.plugins.kubelet_directory import KubeletDirectory
from metagpu.plugins.record import KubeletRecord
from metagpu.plugins.registrar import Registrar
from metagpu.plugins.service import Describe, Service, undescribed


async def serve_offers(
    registry: Registry,
    directory: KubeletDirectory,
    backend: Callable[[ResourceName], Backend],
    record: KubeletRecord | None = None,
    describe: Describe = undescribed,
) -> None:
    """Serve and register whatever the registry offers, until cancelled.

    A resource that stays on offer is not touched when others come or go. What passes between the
    kubelet and us is counted in `record`; CDI names that containers are told go through `describe`.
    """
    record = record or KubeletRecord()
    running: dict[ResourceName, anyio.CancelScope] = {}
    registrar = Registrar(directory)

    async with anyio.create_task_group() as group:
        group.start_soon(directory.watch)

        async for resources in registry.watch(lambda snapshot: tuple(snapshot.offers)):
            for resource in running.keys() - set(resources):
                running.pop(resource).cancel()
                _note_rival(registry, resource, None)
            for resource in resources:
                if resource not in running:
                    counted = record.of(resource)
                    service = Service(
                        resource, registry, backend, record=counted, describe=describe
                    )
                    rivalled = partial(_note_rival, registry, resource)
                    endpoint = Endpoint(service, directory, registrar, rivalled, record)
                    running[resource] = _start(group, endpoint)


def _note_rival(registry: Registry, resource: ResourceName, rival: Path | None) -> None:
    where = None if rival is None else str(rival)
    registry.apply(RivalLeft(resource) if where is None else RivalMet(resource, where))


def _start(group: TaskGroup, endpoint: Endpoint) -> anyio.CancelScope:
    scope = anyio.CancelScope()

    async def run() -> None:
        with scope:
            await endpoint.run()

    group.start_soon(run)
    return scope
