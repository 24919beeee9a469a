"""Our values and errors in the kubelet's messages."""

import re

import pytest
from grpclib.const import Status

from metagpu.core.availability.conflict import conflicting_shares
from metagpu.core.config.errors import ConfigError, ConfigReason
from metagpu.core.errors import (
    DriverTimeout,
    DriverUnavailable,
    GpuLost,
    KubeletError,
    MetagpuError,
)
from metagpu.core.model.gpu import Gpu
from metagpu.core.model.request_errors import (
    FractionSplit,
    GpuUnhealthy,
    RequestError,
    ShareTaken,
    UnknownShare,
)
from metagpu.core.model.shares import ResourceName, Share, ShareId
from metagpu.core.model.snapshot import Snapshot
from metagpu.core.state.facts import GpuFaulted, GpuRecovered, SharesClaimed, SharesOffered
from metagpu.plugins.kubelet import device_plugin, messages
from metagpu.plugins.kubelet.device_plugin import DeviceList
from metagpu.plugins.kubelet.fast_codec import encode_device
from metagpu.plugins.kubelet.pb import v1beta1
from tests.rigs.build import METAGPU, after, gpu, layout_of, offer, offered, pool, share

WRONG = ConfigReason.INVALID_VALUE

A, B = gpu(0, numa_node=0), gpu(1, numa_node=1)


def listed(snapshot: Snapshot, resource: ResourceName = METAGPU) -> v1beta1.ListAndWatchResponse:
    """Return the expected list, in the generated messages."""
    devices = []
    for one in snapshot.offers[resource].shares.values():
        state = snapshot.gpus[one.gpu]
        node = state.gpu.numa_node
        healthy = state.verdict.healthy and one.id not in conflicting_shares(state)
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
    """Return a fault of a GPU."""
    return GpuFaulted(of.id, "XID 79", at=1)


class CountedEncoder:
    """An encoder of devices that records the GPUs it encodes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.encoded: list[str] = []
        self._encode = encode_device
        monkeypatch.setattr(device_plugin, "encode_device", self)

    def __call__(self, share_id: str, *, healthy: bool, numa_node: int | None) -> bytes:
        """Encode one device."""
        self.encoded.append(share_id)
        return self._encode(share_id, healthy=healthy, numa_node=numa_node)

    def taken(self) -> list[str]:
        """Return the GPUs encoded since the last call."""
        taken, self.encoded = self.encoded, []
        return taken


# --- the list -------------------------------------------------------------------------------------


def test_a_list_is_the_generated_messages_bytes() -> None:
    """Through faults and recoveries, the bytes are those of the generated message."""
    _, snapshot = offered(A, B, gpu(2))
    devices = DeviceList(METAGPU)

    for fact in (
        fault(B),
        GpuRecovered(B.id, "quiet", at=2),
        SharesClaimed(snapshot.gpus[A.id].shares[:3], at=3),
        fault(A),
    ):
        snapshot = after(fact, since=snapshot)
        assert devices.encode(devices.view(snapshot)) == bytes(listed(snapshot))


def test_held_shares_are_listed_as_healthy() -> None:
    """A share that a pod holds stays healthy, as the kubelet knows its holder."""
    _, snapshot = offered(A)
    held = after(SharesClaimed(snapshot.gpus[A.id].shares, at=1), since=snapshot)
    devices = DeviceList(METAGPU)

    assert devices.view(held) == devices.view(snapshot)


def test_unavailable_shares_are_listed_as_unhealthy() -> None:
    """A share that another backend's lease excludes is Unhealthy until the lease ends."""
    fraction, whole = share(A, 0), share(A, 0, backend="whole", resource="example.com/gpu")
    layout, snapshot = offered(A)
    snapshot = after(offer(fraction, whole), since=snapshot)
    devices = DeviceList(whole.resource)
    free = devices.encode(devices.view(snapshot))
    held = after(SharesClaimed((fraction,), at=1), since=snapshot)

    assert devices.encode(devices.view(held)) == bytes(listed(held, whole.resource)) != free
    assert layout.shares


def test_only_the_changed_gpus_block_is_encoded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault encodes the shares of its GPU alone; an unchanged list encodes nothing."""
    encoder = CountedEncoder(monkeypatch)
    _, snapshot = offered(A, B)
    devices = DeviceList(METAGPU)
    ids = {each.id: [one.id for one in snapshot.gpus[each.id].shares] for each in (A, B)}

    devices.encode(devices.view(snapshot))
    assert encoder.taken() == [*ids[A.id], *ids[B.id]]

    devices.encode(devices.view(snapshot))
    assert encoder.taken() == []

    devices.encode(devices.view(after(fault(B), since=snapshot)))
    assert encoder.taken() == ids[B.id]


def test_a_view_changes_only_with_the_list() -> None:
    """Facts that change no device's line leave the view equal, and wake no list."""
    _, snapshot = offered(A, B)
    devices = DeviceList(METAGPU)
    before = devices.view(snapshot)
    other = share(B, 0, resource="example.com/other")

    for fact in (
        SharesClaimed(snapshot.gpus[A.id].shares[:1], at=1),
        offer(*snapshot.offers[METAGPU].shares.values(), other),
    ):
        assert devices.view(after(fact, since=snapshot)) == before
    assert devices.view(after(fault(A), since=snapshot)) != before


def test_a_resource_taken_back_is_an_empty_list() -> None:
    """A resource that is not on offer is an empty list."""
    devices = DeviceList(METAGPU)
    _, snapshot = offered(A)

    assert devices.encode(devices.view(Snapshot())) == b""
    assert devices.encode(devices.view(after(SharesOffered((), ()), since=snapshot))) == b""


# --- options and registration ---------------------------------------------------------------------


@pytest.mark.parametrize("pre_start", [False, True])
def test_options_announce_a_preference(*, pre_start: bool) -> None:
    """The options always have the preference, and the pre-start call where a backend needs it."""
    expected = v1beta1.DevicePluginOptions(
        pre_start_required=pre_start, get_preferred_allocation_available=True
    )

    assert (
        v1beta1.DevicePluginOptions.parse(messages.encode_options(pre_start=pre_start)) == expected
    )
    assert messages.build_register_request(
        METAGPU, "x.sock", pre_start=pre_start
    ) == v1beta1.RegisterRequest(
        version="v1beta1", endpoint="x.sock", resource_name=METAGPU, options=expected
    )


def test_the_raw_codec_changes_nothing() -> None:
    """The raw codec passes bytes unchanged in both directions."""
    codec = messages.RawCodec()

    assert codec.encode(b"\x00\xff", bytes) == codec.decode(b"\x00\xff", bytes) == b"\x00\xff"
    assert codec.__content_subtype__ == "proto"


# --- the limit ------------------------------------------------------------------------------------


def test_a_list_within_the_limit_is_let_pass() -> None:
    """A list that the kubelet can receive is accepted, for each resource on its own."""
    messages.check_list_size(layout_of(*[gpu(index) for index in range(16)], text=pool()), "f")
    messages.check_list_size(layout_of(), "f")


def test_a_list_beyond_the_limit_is_refused_with_numbers() -> None:
    """The error has shares, bytes and the limit; the bytes are those of the longest list."""
    layout = layout_of(A, text=pool("sharesPerGpu: 70000"))
    longest = after(fault(A), since=offered(A, text=pool("sharesPerGpu: 70000"))[1])
    devices = DeviceList(METAGPU)
    size = len(devices.encode(devices.view(longest)))

    with pytest.raises(ConfigError) as caught:
        messages.check_list_size(layout, "f.yaml")
    assert str(caught.value) == (
        f"f.yaml: cnvrg.io/metagpu would have 70000 shares, {size} bytes as a list; the kubelet "
        "takes less than 4194304. Configure fewer shares of each GPU, or several resources"
    )


def test_the_limit_is_met_to_the_byte() -> None:
    """A list of exactly the limit is refused, one byte less is not."""
    layout = layout_of(A)
    size = sum(len(encode_device(one.id, healthy=False, numa_node=0)) for one in layout.shares)

    messages.check_list_size(layout, "f", limit=size + 1)
    with pytest.raises(ConfigError, match=f"10 shares, {size} bytes"):
        messages.check_list_size(layout, "f", limit=size)


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
        (ConfigError("wrong", WRONG, file="f"), Status.UNAVAILABLE),
        (MetagpuError("no"), Status.UNAVAILABLE),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_our_errors_become_statuses(error: MetagpuError, status: Status) -> None:
    """Each error becomes a gRPC status, with its own text for the pod."""
    status_error = messages.to_grpc_error(error)
    assert (status_error.status, status_error.message) == (status, str(error))


@pytest.mark.parametrize(
    ("error", "named"),
    [
        (ZeroDivisionError("division by zero"), "ZeroDivisionError: division by zero"),
        (KeyError("GPU-1"), "KeyError: 'GPU-1'"),
        (ValueError("a text is cut off"), "ValueError: a text is cut off"),
    ],
)
def test_a_foreign_error_names_itself(error: Exception, named: str) -> None:
    """Any other error has its name in the text, and not a bare Internal Server Error."""
    status_error = messages.to_grpc_error(error)
    assert status_error.status is Status.INTERNAL
    assert status_error.message == f"metagpu failed ({named}); its log has the details"


def test_ids_are_what_the_kubelet_reads() -> None:
    """A device's id in the list is the share's id, which names its GPU."""
    _, snapshot = offered(A)
    devices = DeviceList(METAGPU)
    message = v1beta1.ListAndWatchResponse.parse(devices.encode(devices.view(snapshot)))
    first: Share = snapshot.gpus[A.id].shares[0]

    assert ShareId(message.devices[0].id) == first.id
    assert all(re.fullmatch(rf"{A.id}::m\d\d", device.id) for device in message.devices)
