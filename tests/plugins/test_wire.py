"""Our values and errors in the kubelet's words."""

import re

import pytest
from grpclib.const import Status

from metagpu.core.errors import (
    ConfigError,
    DriverTimeout,
    DriverUnavailable,
    FractionSplit,
    GpuLost,
    GpuUnhealthy,
    KubeletError,
    MetagpuError,
    RequestError,
    ShareTaken,
    UnknownShare,
)
from metagpu.core.facts import GpuFaulted, GpuRecovered, SharesGranted, SharesOffered
from metagpu.core.gpu import Gpu
from metagpu.core.model import ResourceName, Share, ShareId
from metagpu.core.snapshot import Snapshot
from metagpu.plugins import hot, wire
from metagpu.plugins.pb import v1beta1
from tests.build import METAGPU, after, gpu, laid_out, offer, offered, pool, share

A, B = gpu(0, numa_node=0), gpu(1, numa_node=1)


def listed(snapshot: Snapshot, resource: ResourceName = METAGPU) -> v1beta1.ListAndWatchResponse:
    """Say what the kubelet should be sent, in the generated messages."""
    devices = []
    for one in snapshot.offers[resource].shares.values():
        state = snapshot.gpus[one.gpu]
        node = state.gpu.numa_node
        healthy = state.verdict.healthy and one.id not in state.withheld
        devices.append(
            v1beta1.Device(
                id=one.id,
                health="Healthy" if healthy else "Unhealthy",
                topology=None
                if node is None
                else v1beta1.TopologyInfo(nodes=[v1beta1.NumaNode(id=node)]),
            )
        )
    return v1beta1.ListAndWatchResponse(devices=devices)


def fault(of: Gpu) -> GpuFaulted:
    """Break a GPU."""
    return GpuFaulted(of.id, "XID 79", at=1)


class CountedEncoder:
    """Encodes devices and notes whose it encoded."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.encoded: list[str] = []
        self._encode = hot.device
        monkeypatch.setattr(hot, "device", self)

    def __call__(self, share_id: str, *, healthy: bool, numa_node: int | None) -> bytes:
        """Encode one."""
        self.encoded.append(share_id)
        return self._encode(share_id, healthy=healthy, numa_node=numa_node)

    def taken(self) -> list[str]:
        """Give what was encoded since the last time."""
        taken, self.encoded = self.encoded, []
        return taken


# --- the list -------------------------------------------------------------------------------------


def test_a_list_is_the_generated_messages_bytes() -> None:
    """Through faults and recoveries, the bytes are those of the generated message."""
    _, snapshot = offered(A, B, gpu(2))
    devices = wire.DeviceList(METAGPU)

    for fact in (
        fault(B),
        GpuRecovered(B.id, "quiet", at=2),
        SharesGranted(snapshot.gpus[A.id].shares[:3], at=3),
        fault(A),
    ):
        snapshot = after(fact, since=snapshot)
        assert devices.encode(devices.view(snapshot)) == bytes(listed(snapshot))


def test_held_shares_are_listed_as_healthy() -> None:
    """A share that a pod holds stays healthy: the kubelet knows that it is taken."""
    _, snapshot = offered(A)
    held = after(SharesGranted(snapshot.gpus[A.id].shares, at=1), since=snapshot)
    devices = wire.DeviceList(METAGPU)

    assert devices.view(held) == devices.view(snapshot)


def test_withheld_shares_are_listed_as_unhealthy() -> None:
    """A share that another backend's lease excludes cannot be allocated, and comes back."""
    fraction, whole = share(A, 0), share(A, 0, backend="whole", resource="example.com/gpu")
    layout, snapshot = offered(A)
    snapshot = after(offer(fraction, whole), since=snapshot)
    devices = wire.DeviceList(whole.resource)
    free = devices.encode(devices.view(snapshot))
    held = after(SharesGranted((fraction,), at=1), since=snapshot)

    assert devices.encode(devices.view(held)) == bytes(listed(held, whole.resource)) != free
    assert layout.shares


def test_only_the_changed_gpus_block_is_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault encodes the shares of its GPU and no others; nothing new encodes nothing."""
    encoder = CountedEncoder(monkeypatch)
    _, snapshot = offered(A, B)
    devices = wire.DeviceList(METAGPU)
    ids = {each.id: [one.id for one in snapshot.gpus[each.id].shares] for each in (A, B)}

    devices.encode(devices.view(snapshot))
    assert encoder.taken() == [*ids[A.id], *ids[B.id]]

    devices.encode(devices.view(snapshot))
    assert encoder.taken() == []

    devices.encode(devices.view(after(fault(B), since=snapshot)))
    assert encoder.taken() == ids[B.id]


def test_a_view_changes_only_with_what_the_list_shows() -> None:
    """Facts that no device's line depends on leave the view equal, so that nobody is woken."""
    _, snapshot = offered(A, B)
    devices = wire.DeviceList(METAGPU)
    before = devices.view(snapshot)
    other = share(B, 0, resource="example.com/other")

    for fact in (
        SharesGranted(snapshot.gpus[A.id].shares[:1], at=1),
        offer(*snapshot.offers[METAGPU].shares.values(), other),
    ):
        assert devices.view(after(fact, since=snapshot)) == before
    assert devices.view(after(fault(A), since=snapshot)) != before


def test_a_resource_taken_back_is_an_empty_list() -> None:
    """What is on offer no more, or not yet, is a list of nothing."""
    devices = wire.DeviceList(METAGPU)
    _, snapshot = offered(A)

    assert devices.encode(devices.view(Snapshot())) == b""
    assert devices.encode(devices.view(after(SharesOffered((), ()), since=snapshot))) == b""


# --- options and registration ---------------------------------------------------------------------


@pytest.mark.parametrize("pre_start", [False, True])
def test_options_announce_a_preference(*, pre_start: bool) -> None:
    """We always have a preference; the call before a start is asked for where it is needed."""
    expected = v1beta1.DevicePluginOptions(
        pre_start_required=pre_start, get_preferred_allocation_available=True
    )

    assert v1beta1.DevicePluginOptions.parse(wire.options(pre_start=pre_start)) == expected
    assert wire.register_request(METAGPU, "x.sock", pre_start=pre_start) == v1beta1.RegisterRequest(
        version="v1beta1", endpoint="x.sock", resource_name=METAGPU, options=expected
    )


def test_the_raw_codec_changes_nothing() -> None:
    """The bytes that we made go out as they are, and those that came reach us as they came."""
    codec = wire.RawCodec()

    assert codec.encode(b"\x00\xff", bytes) == codec.decode(b"\x00\xff", bytes) == b"\x00\xff"
    assert codec.__content_subtype__ == "proto"


# --- the limit ------------------------------------------------------------------------------------


def test_a_list_within_the_limit_is_let_pass() -> None:
    """What the kubelet can receive is not refused, for each resource on its own."""
    wire.check_size(laid_out(*[gpu(index) for index in range(16)], text=pool()), "f")
    wire.check_size(laid_out(), "f")


def test_a_list_beyond_the_limit_is_refused_with_numbers() -> None:
    """The message has shares, bytes and the limit; the bytes are those of the longest list."""
    layout = laid_out(A, text=pool("sharesPerGpu: 70000"))
    longest = after(fault(A), since=offered(A, text=pool("sharesPerGpu: 70000"))[1])
    devices = wire.DeviceList(METAGPU)
    size = len(devices.encode(devices.view(longest)))

    with pytest.raises(ConfigError) as caught:
        wire.check_size(layout, "f.yaml")
    assert str(caught.value) == (
        f"f.yaml: cnvrg.io/metagpu would have 70000 shares, {size} bytes as a list; the kubelet "
        "takes less than 4194304. Cut each GPU into fewer shares, or the node into several "
        "resources"
    )


def test_the_limit_is_met_to_the_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    """A list of exactly the limit is refused, one byte less is not."""
    layout = laid_out(A)
    size = sum(len(hot.device(one.id, healthy=False, numa_node=0)) for one in layout.shares)

    monkeypatch.setattr(wire, "LIST_LIMIT", size + 1)
    wire.check_size(layout, "f")
    monkeypatch.setattr(wire, "LIST_LIMIT", size)
    with pytest.raises(ConfigError, match=f"10 shares, {size} bytes"):
        wire.check_size(layout, "f")


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (UnknownShare("r/x", "GPU-1::m00"), Status.NOT_FOUND),
        (GpuUnhealthy("r/x", "0 (GPU-1)", "XID 79"), Status.FAILED_PRECONDITION),
        (ShareTaken("GPU-1::m00", "in use"), Status.FAILED_PRECONDITION),
        (FractionSplit("r/x", 3, "GPU 0: 1", "GPU 0: 6"), Status.FAILED_PRECONDITION),
        (RequestError("no"), Status.FAILED_PRECONDITION),
        (GpuLost("gone"), Status.UNAVAILABLE),
        (DriverTimeout("late"), Status.UNAVAILABLE),
        (DriverUnavailable("no library"), Status.UNAVAILABLE),
        (KubeletError("no"), Status.UNAVAILABLE),
        (ConfigError("wrong", file="f"), Status.UNAVAILABLE),
        (MetagpuError("no"), Status.UNAVAILABLE),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_our_errors_become_statuses(error: MetagpuError, status: Status) -> None:
    """Each error is a status that says whose turn it is, with its own text for the pod."""
    told = wire.as_status(error)
    assert (told.status, told.message) == (status, str(error))


@pytest.mark.parametrize(
    ("error", "named"),
    [
        (ZeroDivisionError("division by zero"), "ZeroDivisionError: division by zero"),
        (KeyError("GPU-1"), "KeyError: 'GPU-1'"),
        (ValueError("a text is cut off"), "ValueError: a text is cut off"),
    ],
)
def test_anyone_elses_error_names_itself(error: Exception, named: str) -> None:
    """A pod never reads a bare Internal Server Error, whatever went wrong."""
    told = wire.as_status(error)
    assert told.status is Status.INTERNAL
    assert told.message == f"metagpu failed ({named}); its log has the details"


def test_ids_are_what_the_kubelet_reads() -> None:
    """A device's id on the wire is the share's, which names its GPU."""
    _, snapshot = offered(A)
    devices = wire.DeviceList(METAGPU)
    message = v1beta1.ListAndWatchResponse.parse(devices.encode(devices.view(snapshot)))
    first: Share = snapshot.gpus[A.id].shares[0]

    assert ShareId(message.devices[0].id) == first.id
    assert all(re.fullmatch(rf"{A.id}::m\d\d", device.id) for device in message.devices)
