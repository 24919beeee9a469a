"""The client of every plugin measured here: grpcio, which neither side is made of.

Payloads are encoded beforehand and answers are left as bytes, so a call's time is the wire, the
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

from metagpu.plugins.pb import v1beta1

_SERVICE: Final = "/v1beta1.DevicePlugin"
_PATIENCE: Final = 30.0
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
        """Give the list as it is now."""
        with self.lists() as lists:
            return lists.take().message

    @contextmanager
    def lists(self) -> Iterator["Lists"]:
        """Hold a ListAndWatch stream open while the block lasts."""
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
    """What arrives on one ListAndWatch stream."""

    def __init__(self) -> None:
        self._arrivals: queue.SimpleQueue[Arrival] = queue.SimpleQueue()

    def read(self, call: Iterator[bytes]) -> None:
        """Note every message until the stream ends."""
        try:
            for message in call:
                self._arrivals.put(Arrival(time.perf_counter(), message))
        except grpc.RpcError:
            pass  # cancelled by us, or the daemon is gone: who waits for a message will tell

    def take(self) -> Arrival:
        """Give the next message.

        Raises:
            queue.Empty: if none comes.
        """
        return self._arrivals.get(timeout=_PATIENCE)

    def changed(self, known: bytes) -> Arrival:
        """Give the next message that differs from a known one."""
        while (arrival := self.take()).message == known:
            pass
        return arrival


@contextmanager
def connected(socket: Path) -> Iterator[Client]:
    """Connect to a plugin while the block lasts."""
    with grpc.insecure_channel(f"unix:{socket}", options=_OPTIONS) as channel:
        yield Client(channel)


def ids_in(message: bytes) -> list[str]:
    """Name the devices of a list, in its order."""
    return [device.id for device in v1beta1.ListAndWatchResponse.parse(message).devices]


def allocate_request(ids: Sequence[str]) -> bytes:
    """Encode the kubelet's question for one container."""
    container = v1beta1.ContainerAllocateRequest(devices_ids=list(ids))
    return bytes(v1beta1.AllocateRequest(container_requests=[container]))


def pre_start_request(ids: Sequence[str]) -> bytes:
    """Encode what the kubelet says before a container starts."""
    return bytes(v1beta1.PreStartContainerRequest(devices_ids=list(ids)))


def preferred_request(available: Sequence[str], size: int) -> bytes:
    """Encode the kubelet's question for one container, nothing being required."""
    container = v1beta1.ContainerPreferredAllocationRequest(
        available_deviceIDs=list(available), allocation_size=size
    )
    return bytes(v1beta1.PreferredAllocationRequest(container_requests=[container]))
