"""The client of every measured plugin: grpcio, which neither side uses.

Requests are encoded beforehand and answers stay bytes, so that a call's time is the transport, the
client's constant share, and the server.
"""

import queue
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

import grpc

from metagpu.plugins.kubelet.pb import v1beta1

_SERVICE: Final = "/v1beta1.DevicePlugin"
_TIMEOUT: Final = 120.0
_OPTIONS: Final = (
    ("grpc.use_local_subchannel_pool", 1),  # a connection of its own for every client
    ("grpc.max_receive_message_length", 4 * 1024 * 1024),  # grpc-go's, so the kubelet's
)


class Client:
    """One connection to a plugin's socket."""

    def __init__(self, channel: grpc.Channel) -> None:
        self.allocate = channel.unary_unary(f"{_SERVICE}/Allocate")
        self.prefer = channel.unary_unary(f"{_SERVICE}/GetPreferredAllocation")
        self.options = channel.unary_unary(f"{_SERVICE}/GetDevicePluginOptions")
        self.pre_start = channel.unary_unary(f"{_SERVICE}/PreStartContainer")
        self._list_and_watch = channel.unary_stream(f"{_SERVICE}/ListAndWatch")

    def first_list(self) -> bytes:
        """Return the current list."""
        with self.lists() as lists:
            return lists.take().message

    @contextmanager
    def lists(self) -> Iterator["Lists"]:
        """Keep a ListAndWatch stream open until the block ends."""
        call = self._list_and_watch(b"")
        lists = Lists()
        reader = threading.Thread(target=lists.read, args=(call,), daemon=True)
        reader.start()

        try:
            yield lists
        finally:
            call.cancel()
            reader.join()


class Arrival(NamedTuple):
    """One message of a stream, and when it was here (`time.perf_counter`)."""

    at: float
    message: bytes


class Lists:
    """The messages of one ListAndWatch stream."""

    def __init__(self) -> None:
        self._arrivals: queue.SimpleQueue[Arrival] = queue.SimpleQueue()

    def read(self, call: Iterator[bytes]) -> None:
        """Record every message until the stream ends."""
        try:
            for message in call:
                self._arrivals.put(Arrival(time.perf_counter(), message))
        except grpc.RpcError:
            pass  # cancelled by us, or the daemon is gone: the next `take` raises

    def take(self) -> Arrival:
        """Return the next message.

        Raises:
            queue.Empty: no message comes in time.
        """
        return self._arrivals.get(timeout=_TIMEOUT)

    def changed(self, known: bytes) -> Arrival:
        """Return the next message that differs from a known one."""
        while (arrival := self.take()).message == known:
            pass
        return arrival


@contextmanager
def connected(socket: Path) -> Iterator[Client]:
    """Connect to a plugin until the block ends."""
    with grpc.insecure_channel(f"unix:{socket}", options=_OPTIONS) as channel:
        grpc.channel_ready_future(channel).result(_TIMEOUT)  # bound is not yet listening
        yield Client(channel)


def ids_in(message: bytes) -> list[str]:
    """Return the device ids of a list, in its order."""
    return [device.id for device in v1beta1.ListAndWatchResponse.parse(message).devices]


def allocate_request(ids: Sequence[str]) -> bytes:
    """Return the kubelet's Allocate request for one container."""
    container = v1beta1.ContainerAllocateRequest(devices_ids=list(ids))
    return bytes(v1beta1.AllocateRequest(container_requests=[container]))


def pre_start_request(ids: Sequence[str]) -> bytes:
    """Return the kubelet's request before a container starts."""
    return bytes(v1beta1.PreStartContainerRequest(devices_ids=list(ids)))


def preferred_request(available: Sequence[str], size: int) -> bytes:
    """Return the kubelet's preference request for one container, without required ids."""
    container = v1beta1.ContainerPreferredAllocationRequest(
        available_deviceIDs=list(available), allocation_size=size
    )
    return bytes(v1beta1.PreferredAllocationRequest(container_requests=[container]))
