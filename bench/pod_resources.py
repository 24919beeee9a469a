"""A kubelet's account of who holds what, which the bench writes itself."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import grpc

from metagpu.plugins.pb import v1

_SERVICE: Final = "v1.PodResourcesLister"
_PATIENCE: Final = 30.0


class PodResources:
    """What is told to whoever asks: one pod that holds it all."""

    def __init__(self) -> None:
        self._answer = b""
        self._asked = threading.Event()

    def hold(self, ids: Mapping[str, Sequence[str]]) -> None:
        """Let the pod hold these ids from now on: resource -> ids."""
        devices = [
            v1.ContainerDevices(resource_name=resource, device_ids=list(held))
            for resource, held in ids.items()
        ]
        container = v1.ContainerResources(name="main", devices=devices)
        pod = v1.PodResources(name="pod", namespace="bench", containers=[container])
        self._answer = bytes(v1.ListPodResourcesResponse(pod_resources=[pod] if ids else []))

    def await_question(self) -> None:
        """Wait until somebody has asked, from now on.

        Raises:
            TimeoutError: if nobody does.
        """
        self._asked.clear()
        if not self._asked.wait(_PATIENCE):
            raise TimeoutError("nobody asked who holds what")

    def _tell(self, _: bytes, __: grpc.ServicerContext) -> bytes:
        self._asked.set()
        return self._answer

    @contextmanager
    def served(self, socket: Path) -> Iterator[None]:
        """Answer on a socket until the block ends."""
        method = grpc.unary_unary_rpc_method_handler(self._tell)
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
