"""The page of one pod: its view, by what the daemon answers to the pod itself."""

import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from anyio import to_thread

from metagpu.core.errors import MetagpuError
from metagpu.core.model.quantities import iso_time
from metagpu.plugins.pod_api.frames import ask_daemon
from metagpu.plugins.web.changes import Object, PolledView, digest_of

if TYPE_CHECKING:
    from collections.abc import Sequence


class OwnPodView(PolledView):
    """The view of the pod that this process is in.

    Args:
        socket: the daemon's, as containers see it.
        interval: seconds for which a view serves all requests, and between two looks.
    """

    def __init__(self, socket: Path, interval: float = 2.0) -> None:
        super().__init__(self._look, interval)
        self._socket = socket
        self._node: Object = {}
        self._events: Sequence[Object] = ()

    async def check(self) -> None:
        """Look once.

        Raises:
            MetagpuError: the daemon does not answer, or not this process.
        """
        await self._ask()

    async def _look(self) -> tuple[Object, bytes]:
        """Return the view and its digest; without an answer, a view that says why."""
        try:
            await self._ask()
        except MetagpuError as error:
            self._node = {**self._node, "problem": str(error), "status": None, "usage": None}
        view = {"kind": "pod", "nodes": [self._node], "events": self._events, "waiting": []}
        return {**view, "at": iso_time(time.time())}, digest_of(view)

    async def _ask(self) -> None:
        devices, processes = [
            msgspec.json.decode(
                await to_thread.run_sync(
                    partial(ask_daemon, self._socket, "get", kind, "-o", "json"),
                    abandon_on_cancel=True,
                )
            )
            for kind in ("devices", "processes")
        ]
        self._node = node_of_pod(devices, processes)
        self._events = devices.get("events", ())  # a daemon of an earlier version has none


def node_of_pod(devices: Object, processes: Object) -> dict[str, Any]:
    """Return the pod's part of its node, in the shape of a node's own view. Pure.

    What the daemon does not tell a pod is not in it: what is free, and what others hold.

    Args:
        devices: the answer to `get devices`.
        processes: the answer to `get processes`.
    """
    containers = processes["containers"]
    leases = [
        {
            "resource": part["resource"],
            "gpu": part["index"],
            "uuid": part["uuid"],
            "shares": part["shares"],
            "holder": f"{container['namespace']}/{container['pod']} ({container['container']})",
        }
        for container in containers
        for part in container["gpus"]
    ]
    pods = [f"{container['namespace']}/{container['pod']}" for container in containers]
    return {
        "name": devices["node"],
        "pod": pods[0] if pods else None,
        "problem": "",
        "labels": {},
        "status": {
            "gpus": [_gpu(gpu, pods[0] if pods else "") for gpu in devices["gpus"]],
            "leases": leases,
        },
        "usage": {
            **devices,
            "containers": list(map(_without_processes, containers)),
            "unauthorized": len(processes["unauthorized"]),
        },
    }


def _without_processes(container: Object) -> dict[str, Any]:
    """Return a container with its number of processes, as the status API has it."""
    gpus = [{**gpu, "processes": len(gpu["processes"])} for gpu in container["gpus"]]
    return {**container, "gpus": gpus}


def _gpu(report: Object, pod: str) -> dict[str, Any]:
    shown = ("index", "uuid", "product", "memoryMiB", "healthy", "reason", "since")
    devices = [
        {**device, "holder": f"{pod} ({device['container']})"} for device in report["devices"]
    ]
    return {
        **{name: report[name] for name in shown},
        "faults": [
            {"device": device["device"], "shares": [device["share"]], **device["fault"]}
            for device in devices
            if device["fault"]
        ],
        "devices": devices,
        "slices": report["slices"],
        "shares": {
            share["resource"]: {"capacity": share["capacity"]} for share in report["shares"]
        },
    }
