"""Hand-written protobuf, compared with the generated messages of `proto/`."""

from collections.abc import Callable
from contextlib import nullcontext
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metagpu.core.grants.grant import DeviceNode, Grant, Mount
from metagpu.plugins.kubelet import fast_codec as hot
from metagpu.plugins.kubelet.pb import v1, v1beta1

ASCII = st.text(st.characters(min_codepoint=1, max_codepoint=126), max_size=300)
"""Ids: ours are ASCII of less than 128 bytes; anyone else's may be longer."""
IDS = st.lists(ASCII, max_size=8)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=200)
SIZES = st.integers(0, 2**31 - 1)


def allocation(*containers: list[str]) -> bytes:
    """Encode an AllocateRequest as the generated messages do."""
    requests = [v1beta1.ContainerAllocateRequest(devices_ids=ids) for ids in containers]
    return bytes(v1beta1.AllocateRequest(container_requests=requests))


def preference(*containers: hot.PreferredAllocation) -> bytes:
    """Encode a PreferredAllocationRequest as the generated messages do."""
    requests = [
        v1beta1.ContainerPreferredAllocationRequest(
            available_deviceIDs=list(asked.available),
            must_include_deviceIDs=list(asked.required),
            allocation_size=asked.size,
        )
        for asked in containers
    ]
    return bytes(v1beta1.PreferredAllocationRequest(container_requests=requests))


# --- decoding -------------------------------------------------------------------------------------


@given(st.lists(IDS, max_size=4))
def test_allocate_requests(containers: list[list[str]]) -> None:
    """Every AllocateRequest is decoded as encoded, each container's ids in order."""
    assert hot.decode_allocate_request(allocation(*containers)) == containers


@st.composite
def alike(draw: st.DrawFn) -> list[str]:
    """Draw ids of one length, of few characters: also those that frame an id of that length."""
    length = draw(st.integers(0, 130))
    each = st.text(
        st.sampled_from(["\n", chr(length % 128), "a"]), min_size=length, max_size=length
    )
    return draw(st.lists(each, max_size=5))


@given(alike(), IDS, SIZES)
def test_ids_of_one_length(ids: list[str], required: list[str], size: int) -> None:
    """Ids of equal length are decoded as encoded, whatever bytes they have."""
    asked = hot.PreferredAllocation(ids, required, size)

    assert hot.decode_allocate_request(allocation(ids)) == [ids]
    assert hot.decode_preferred_request(preference(asked)) == [asked]


@given(st.lists(st.text(st.sampled_from(["\n", "\x01", "\x02", "a"]), max_size=4), max_size=6), IDS)
def test_ids_of_several_lengths(ids: list[str], required: list[str]) -> None:
    """Ids of several lengths are decoded as encoded, also where a text looks like a head."""
    asked = hot.PreferredAllocation(ids, required, 1)

    assert hot.decode_allocate_request(allocation(ids)) == [ids]
    assert hot.decode_preferred_request(preference(asked)) == [asked]


def test_ids_of_more_than_a_hundred_shares() -> None:
    """Ids that differ in length by a digit are decoded together, not one after the other."""
    ids = [f"GPU-{UUID(int=0)}::m{number:02d}" for number in range(150)]
    message = (
        b"".join(b"\n" + bytes([len(share_id)]) + share_id.encode() for share_id in ids)
        + b"\x18\x04"
    )

    assert hot._decode_short(message.decode("latin-1")) == (ids, len(message) - 2)


@given(IDS)
def test_pre_start_requests(ids: list[str]) -> None:
    """Every PreStartContainerRequest is decoded as encoded."""
    message = v1beta1.PreStartContainerRequest(devices_ids=ids)

    assert hot.decode_pre_start_request(bytes(message)) == ids


PREFERENCES = st.lists(st.builds(hot.PreferredAllocation, IDS, IDS, SIZES), max_size=3)


@given(PREFERENCES)
def test_preferred_requests(containers: list[hot.PreferredAllocation]) -> None:
    """Every PreferredAllocationRequest is decoded as encoded."""
    assert hot.decode_preferred_request(preference(*containers)) == containers


def test_a_request_of_nothing() -> None:
    """No bytes are a message without containers, and an empty container has no ids."""
    assert hot.decode_allocate_request(b"") == []
    assert hot.decode_allocate_request(b"\x0a\x00") == [[]]
    assert hot.decode_preferred_request(b"\x0a\x00") == [hot.PreferredAllocation([], [], 0)]
    assert hot.decode_pre_start_request(b"") == []


def varint(value: int) -> bytes:
    """Encode a number as protobuf does."""
    low, rest = value & 0x7F, value >> 7
    return bytes([low | 0x80]) + varint(rest) if rest else bytes([low])


FIELDS = st.integers(4, 2**29 - 1)
UNKNOWN = st.one_of(
    st.builds(lambda n, v: varint(n << 3) + varint(v), FIELDS, st.integers(0, 2**64 - 1)),
    st.builds(lambda n, v: varint(n << 3 | 1) + v, FIELDS, st.binary(min_size=8, max_size=8)),
    st.builds(lambda n, v: varint(n << 3 | 2) + varint(len(v)) + v, FIELDS, st.binary()),
    st.builds(lambda n, v: varint(n << 3 | 5) + v, FIELDS, st.binary(min_size=4, max_size=4)),
)
"""Fields that a later version of the protocol may have, of every wire type."""


def framed(body: bytes) -> bytes:
    """Frame a container request's body."""
    return b"\x0a" + varint(len(body)) + body


@given(st.lists(UNKNOWN, min_size=4, max_size=4), IDS, IDS, SIZES)
def test_fields_of_later_versions_are_skipped(
    unknown: list[bytes], available: list[str], required: list[str], size: int
) -> None:
    """Unknown fields, at any place, change nothing."""
    asked = hot.PreferredAllocation(available, required, size)
    body = preference(asked)
    inner = bytes(
        v1beta1.ContainerPreferredAllocationRequest(
            available_deviceIDs=available, must_include_deviceIDs=required, allocation_size=size
        )
    )
    message = unknown[0] + framed(unknown[1] + inner + unknown[2]) + unknown[3]

    assert hot.decode_preferred_request(message) == hot.decode_preferred_request(body) == [asked]


def test_known_fields_may_come_in_any_order() -> None:
    """Fields come in any order, and the last value of a repeated number counts."""
    body = b"\x18\x05" + b"\x12\x01b" + b"\x0a\x01a" + b"\x18\x02" + b"\x0a\x01c"

    assert hot.decode_preferred_request(framed(body)) == [
        hot.PreferredAllocation(["a", "c"], ["b"], 2)
    ]


@pytest.mark.parametrize("length", [0, 1, 127, 128, 129, 16383, 16384])
def test_texts_of_any_length(length: int) -> None:
    """Texts with lengths of one, two and three bytes are decoded alike."""
    text = "x" * length

    assert hot.decode_allocate_request(allocation([text, "y"])) == [[text, "y"]]


DECODERS: list[Callable[[bytes], object]] = [
    hot.decode_allocate_request,
    hot.decode_preferred_request,
    hot.decode_pre_start_request,
    hot.decode_pod_list,
]


@given(st.lists(IDS, min_size=1, max_size=3))
def test_a_cut_message_is_a_value_error(containers: list[list[str]]) -> None:
    """Bytes that end inside a container are refused; bytes that end between two are fewer."""
    data = allocation(*containers)
    ends = {len(allocation(*containers[:count])): count for count in range(len(containers))}

    for cut in range(len(data)):
        if cut in ends:
            assert hot.decode_allocate_request(data[:cut]) == containers[: ends[cut]]
        else:
            with pytest.raises(ValueError, match="is cut off"):
                hot.decode_allocate_request(data[:cut])


@given(IDS)
def test_a_cut_container_is_a_value_error(ids: list[str]) -> None:
    """Bytes that end inside an id are refused; bytes that end between two are fewer."""
    data = bytes(v1beta1.PreStartContainerRequest(devices_ids=ids))
    ends = {
        len(bytes(v1beta1.PreStartContainerRequest(devices_ids=ids[:count]))): count
        for count in range(len(ids))
    }

    for cut in range(len(data)):
        if cut in ends:
            assert hot.decode_pre_start_request(data[:cut]) == ids[: ends[cut]]
        else:
            with pytest.raises(ValueError, match="is cut off"):
                hot.decode_pre_start_request(data[:cut])


@given(st.binary(max_size=60), st.sampled_from(DECODERS))
def test_any_bytes_are_a_message_or_a_value_error(
    data: bytes, decode: Callable[[bytes], object]
) -> None:
    """Any bytes give a list or a ValueError, and no other error."""
    try:
        decoded = decode(data)
    except ValueError as error:
        assert not isinstance(error, UnicodeError)  # noqa: PT017 - either end is a good one
    else:
        assert isinstance(decoded, list)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"\x0a", "a number is cut off"),
        (b"\x0a\x05abc", "a field is cut off"),
        (b"\x0a\x03\x0a\x05a", "a text is cut off"),
        (b"\x0a\x02\x0a\xff", "a number is cut off"),
        (b"\x0a\x04\x0a\x80\x01a", "a field is cut off"),
        (b"\x0a\x01\x0a", "a number is cut off"),
        (b"\x0a\x01\x18", "a number is cut off"),
        (b"\x21\x00\x00", "a field is cut off"),
        (b"\x25\x00\x00", "a field is cut off"),
        (b"\x23", "there is no wire type 3"),
        (b"\x0a\x01\x27", "there is no wire type 7"),
        (b"\x20" + b"\xff" * 10 + b"\x01", "a number is too long"),
    ],
)
def test_broken_bytes_are_refused_with_a_reason(data: bytes, problem: str) -> None:
    """Bytes that are no message are refused with the reason."""
    with pytest.raises(ValueError, match=f"^{problem}$"):
        hot.decode_preferred_request(data)


def test_ids_that_are_no_text_are_unknown_ids() -> None:
    """An id that is not UTF-8 is decoded as an unknown id, and not refused."""
    [[share]] = hot.decode_allocate_request(b"\x0a\x03\x0a\x01\xff")

    assert share == "\xff"


TOPOLOGIES = st.none() | st.builds(
    lambda ids: v1.TopologyInfo(nodes=[v1.NumaNode(id=value) for value in ids]),
    st.lists(st.integers(0, 2**31), max_size=2),
)
CONTAINERS = st.builds(
    v1.ContainerResources,
    name=TEXTS,
    devices=st.lists(
        st.builds(
            v1.ContainerDevices,
            resource_name=TEXTS | st.just("cnvrg.io/metagpu"),
            device_ids=st.lists(TEXTS | ASCII, max_size=3),
            topology=TOPOLOGIES,
        ),
        max_size=4,
    ),
    cpu_ids=st.lists(st.integers(0, 300), max_size=3),
    memory=st.lists(st.builds(v1.ContainerMemory, memory_type=TEXTS, size=SIZES), max_size=1),
    dynamic_resources=st.lists(
        st.builds(
            v1.DynamicResource,
            claim_name=TEXTS,
            claim_resources=st.lists(
                st.builds(
                    v1.ClaimResource,
                    cdi_devices=st.lists(st.builds(v1.CdiDevice, name=TEXTS), max_size=2),
                    driver_name=TEXTS,
                ),
                max_size=2,
            ),
        ),
        max_size=2,
    ),
)
PODS = st.lists(
    st.builds(
        v1.PodResources,
        name=TEXTS,
        namespace=TEXTS,
        containers=st.lists(CONTAINERS, max_size=2),
    ),
    max_size=3,
)


def listed(pods: list[v1.PodResources]) -> list[hot.ListedPod]:
    """Convert generated messages."""
    return [
        hot.ListedPod(
            pod.namespace,
            pod.name,
            tuple(
                hot.ListedContainer(
                    container.name,
                    [(each.resource_name, each.device_ids) for each in container.devices],
                    [
                        device.name
                        for resource in container.dynamic_resources
                        for claimed in resource.claim_resources
                        for device in claimed.cdi_devices
                    ],
                )
                for container in pod.containers
            ),
        )
        for pod in pods
    ]


@given(PODS, st.lists(UNKNOWN, min_size=2, max_size=2))
def test_pod_lists(pods: list[v1.PodResources], unknown: list[bytes]) -> None:
    """Every list of pods is decoded as encoded, also between fields of a later version."""
    data = unknown[0] + bytes(v1.ListPodResourcesResponse(pod_resources=pods)) + unknown[1]

    assert hot.decode_pod_list(data) == listed(pods)


@given(PODS)
def test_a_cut_pod_list_is_a_value_error_or_has_fewer_pods(pods: list[v1.PodResources]) -> None:
    """Bytes that end inside a pod are refused; bytes that end between two are fewer pods."""
    data = bytes(v1.ListPodResourcesResponse(pod_resources=pods))
    ends = {
        len(bytes(v1.ListPodResourcesResponse(pod_resources=pods[:count]))): count
        for count in range(len(pods) + 1)
    }
    for cut in range(len(data)):
        if cut in ends:
            assert hot.decode_pod_list(data[:cut]) == listed(pods[: ends[cut]])
        else:
            with pytest.raises(ValueError, match="is cut off"):
                hot.decode_pod_list(data[:cut])


def test_a_device_with_any_topology_is_decoded() -> None:
    """The kubelet's usual device has one id; another length or topology changes nothing."""
    for nodes in ([], [0], [1], [127], [128], [0, 1]):
        topology = v1.TopologyInfo(nodes=[v1.NumaNode(id=node) for node in nodes])
        for length in (1, 13, 127, 128):
            device = v1.ContainerDevices(
                resource_name="cnvrg.io/metagpu", device_ids=["m" * length], topology=topology
            )
            assert hot._devices(bytes(device)) == ("cnvrg.io/metagpu", ["m" * length])


# --- encoding -------------------------------------------------------------------------------------

GRANTS = st.builds(
    Grant,
    envs=st.dictionaries(TEXTS, TEXTS, max_size=3),
    mounts=st.lists(st.builds(Mount, TEXTS, TEXTS, st.booleans()), max_size=3).map(tuple),
    nodes=st.lists(st.builds(DeviceNode, TEXTS, TEXTS, TEXTS), max_size=3).map(tuple),
    annotations=st.dictionaries(TEXTS, TEXTS, max_size=3),
    cdi_names=st.lists(TEXTS, max_size=3).map(tuple),
)


def generated(grant: Grant) -> v1beta1.ContainerAllocateResponse:
    """Encode a grant as the generated messages do."""
    return v1beta1.ContainerAllocateResponse(
        envs=dict(grant.envs),
        mounts=[
            v1beta1.Mount(
                container_path=mount.container_path,
                host_path=mount.host_path,
                read_only=mount.read_only,
            )
            for mount in grant.mounts
        ],
        devices=[
            v1beta1.DeviceSpec(
                container_path=node.container_path,
                host_path=node.host_path,
                permissions=node.permissions,
            )
            for node in grant.nodes
        ],
        annotations=dict(grant.annotations),
        cdi_devices=[v1beta1.CdiDevice(name=name) for name in grant.cdi_names],
    )


@given(st.lists(GRANTS, max_size=3))
def test_allocate_responses(grants: list[Grant]) -> None:
    """Every grant decodes as it was, one response for each (case 41)."""
    message = v1beta1.AllocateResponse.parse(hot.encode_allocate_response(grants))

    assert message == v1beta1.AllocateResponse(
        container_responses=[generated(grant) for grant in grants]
    )


@given(st.lists(IDS, max_size=4))
def test_preferred_responses(choices: list[list[str]]) -> None:
    """Every choice decodes as it was, one response for each."""
    choices = [[share for share in choice if share] for choice in choices]
    message = v1beta1.PreferredAllocationResponse.parse(hot.encode_preferred_response(choices))

    assert [answer.device_i_ds for answer in message.container_responses] == choices


@given(st.lists(st.tuples(ASCII, st.lists(ASCII, max_size=3), st.booleans()), max_size=5))
def test_allocatable_resources(entries: list[tuple[str, list[str], bool]]) -> None:
    """The ids of all entries of a resource are one set, whatever else the answer has."""
    devices = [
        v1.ContainerDevices(
            resource_name=name,
            device_ids=ids,
            topology=v1.TopologyInfo(nodes=[v1.NumaNode(id=1)]) if numa else None,
        )
        for name, ids, numa in entries
    ]
    answer = v1.AllocatableResourcesResponse(devices=devices, cpu_ids=[1, 200])
    found = hot.decode_allocatable_response(bytes(answer))

    assert found == {
        name: frozenset(share_id for other, ids, _ in entries if other == name for share_id in ids)
        for name, _, _ in entries
    }


DEVICES = st.tuples(TEXTS, st.booleans(), st.none() | st.integers(0, 2**31 - 1))


@given(st.lists(DEVICES, max_size=5))
def test_devices_are_joined_to_a_list(devices: list[tuple[str, bool, int | None]]) -> None:
    """Devices encoded one by one and joined are the kubelet's list."""
    data = b"".join(
        hot.encode_device(share, healthy=healthy, numa_node=numa)
        for share, healthy, numa in devices
    )

    assert v1beta1.ListAndWatchResponse.parse(data) == v1beta1.ListAndWatchResponse(
        devices=[
            v1beta1.Device(
                id=share,
                health="Healthy" if healthy else "Unhealthy",
                topology=None
                if numa is None
                else v1beta1.TopologyInfo(nodes=[v1beta1.NumaNode(id=numa)]),
            )
            for share, healthy, numa in devices
        ]
    )


@pytest.mark.parametrize("numa", [None, 0, 1, 127, 128])
def test_a_devices_bytes_are_the_generated_ones(numa: int | None) -> None:
    """NUMA node 0 is encoded as a node; without a node there is no topology."""
    topology = None if numa is None else v1beta1.TopologyInfo(nodes=[v1beta1.NumaNode(id=numa)])
    device = v1beta1.Device(id="GPU-1::m00", health="Healthy", topology=topology)

    assert hot.encode_device("GPU-1::m00", healthy=True, numa_node=numa) == bytes(
        v1beta1.ListAndWatchResponse(devices=[device])
    )


@pytest.mark.parametrize(
    ("data", "is_one"),
    [(b"", 1), (b"\x0a\x01a", 1), (b"\x0a\x02a", 0), (b"\x05abcd", 0), (b"\x02\x00", 0)],
)
def test_bytes_are_a_message_or_not(data: bytes, is_one: int) -> None:
    """A message of any fields is one; a field that is cut short or has the number 0 is in none."""
    with nullcontext() if is_one else pytest.raises(ValueError, match=r"."):
        hot.check_message(data)
