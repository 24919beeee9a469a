"""A PodResources service whose holders the bench sets."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import grpc

from bench import client
from bench.client import Client
from metagpu.plugins.kubelet.pb import v1

_SERVICE: Final = "v1.PodResourcesLister"
_TIMEOUT: Final = 30.0


class PodResources:
    """The answer of PodResources: one pod that holds all listed ids."""

    def __init__(self) -> None:
        self._answer = b""
        self._called = threading.Event()

    def hold(self, ids: Mapping[str, Sequence[str]]) -> None:
        """Set the ids that the pod holds from now on, by resource."""
        devices = [
            v1.ContainerDevices(resource_name=resource, device_ids=list(held))
            for resource, held in ids.items()
        ]
        container = v1.ContainerResources(name="main", devices=devices)
        pod = v1.PodResources(name="pod", namespace="bench", containers=[container])
        self._answer = bytes(v1.ListPodResourcesResponse(pod_resources=[pod] if ids else []))

    def lease_all(self, plugin: Client, resource: str) -> None:
        """Allocate all shares of a plugin for the pod, and wait until the daemon has read it."""
        ids = client.ids_in(plugin.first_list())
        for at in range(0, len(ids), 50):
            plugin.allocate(client.allocate_request(ids[at : at + 50]))
        self.hold({resource: ids})
        for _ in range(2):
            self.wait_for_list()

    def wait_for_list(self) -> None:
        """Wait for the next call of List.

        Raises:
            TimeoutError: no call comes in time.
        """
        self._called.clear()
        if not self._called.wait(_TIMEOUT):
            raise TimeoutError("no List call came")

    def _list(self, _: bytes, __: grpc.ServicerContext) -> bytes:
        self._called.set()
        return self._answer

    @contextmanager
    def served(self, socket: Path) -> Iterator[None]:
        """Serve on a socket until the block ends."""
        method = grpc.unary_unary_rpc_method_handler(self._list)
        handler = grpc.method_handlers_generic_handler(_SERVICE, {"List": method})

        with ThreadPoolExecutor(2) as threads:
            server = grpc.server(threads)
            server.add_generic_rpc_handlers([handler])
            server.add_insecure_port(f"unix:{socket}")
            server.start()
            try:
                yield
            finally:
                server.stop(grace=None).wait()
