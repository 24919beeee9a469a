"""Hand-written protobuf for calls in which the kubelet waits, and long lists.

`proto/deviceplugin.proto` is the specification: tests compare every function here with the
generated messages. Decoding 800 ids takes a tenth of the generic decoder's time, and a list is
joined from pieces that were encoded once.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Final, NamedTuple

import msgspec

from metagpu.core.grants.grant import Grant

_SHORT: Final = 0x80
"""Lengths below this are one byte; every id of ours is."""
_ONE_BYTE: Final = tuple(bytes((value,)) for value in range(_SHORT))
_WIDEST: Final = 70
"""Bits in ten bytes, the longest varint there is."""
_CACHED: Final = 1024
"""Mounts, device nodes and devices' states with a cached encoding: a node has a few of each."""
_FIELD_1_TAG: Final = 0x0A
_FRAMED: Final = 2
"""The wire type of messages and texts."""
_ONE_BYTE_FRAMED: Final = 0x87
"""The bits of a tag that are those of `_FRAMED` in a framed field's tag of one byte."""
_HEAD: Final = re.compile("\n(.)", re.DOTALL)
"""The tag of field 1, and one byte of length."""
_ONE_DEVICE: Final = re.compile(
    rb"\x0a([\x01-\x7f])([\x20-\x7e]+)\x12([\x01-\x7f])([\x20-\x7e]+)"
    rb"(?:\x1a(?:\x00|\x02\x0a\x00|\x04\x0a\x02\x08[\x00-\x7f]))?"
)
"""A resource, one id, and no topology or that of one NUMA node."""
_FIELD_1, _FIELD_2, _FIELD_3, _FIELD_4, _FIELD_5 = b"\x0a", b"\x12", b"\x1a", b"\x22", b"\x2a"


class PreferredAllocation(msgspec.Struct, frozen=True):
    """One container's request: choose `size` of `available`, with all of `required`."""

    available: Sequence[str]
    required: Sequence[str]
    size: int


class ListedContainer(NamedTuple):
    """A container as PodResources lists it.

    Attributes:
        devices: the ids of resources, in any number of parts.
        cdi_names: the CDI names that it has by ResourceClaims.
    """

    name: str
    devices: Sequence[tuple[str, Sequence[str]]]
    cdi_names: Sequence[str]


class ListedPod(NamedTuple):
    """A pod as PodResources lists it."""

    namespace: str
    name: str
    containers: Sequence[ListedContainer]


def decode_allocate_request(data: bytes) -> list[list[str]]:
    """Decode an AllocateRequest: the requested ids of each container.

    Raises:
        ValueError: the bytes are no such message.
    """
    return [_container(part)[0] for part in _parts(data)]


def decode_pre_start_request(data: bytes) -> list[str]:
    """Decode a PreStartContainerRequest: the ids of the starting container.

    Raises:
        ValueError: the bytes are no such message.
    """
    return _container(data)[0]


def decode_preferred_request(data: bytes) -> list[PreferredAllocation]:
    """Decode a PreferredAllocationRequest.

    Raises:
        ValueError: the bytes are no such message.
    """
    return [PreferredAllocation(*_container(part)) for part in _parts(data)]


def decode_allocatable_response(data: bytes) -> dict[str, frozenset[str]]:
    """Decode an AllocatableResourcesResponse: the healthy ids of each resource.

    Raises:
        ValueError: the bytes are no such message.
    """
    found: dict[str, set[str]] = {}
    for part in _parts(data):
        resource, ids = _devices(part)
        found.setdefault(resource, set()).update(ids)
    return {resource: frozenset(ids) for resource, ids in found.items()}


def decode_pod_list(data: bytes) -> list[ListedPod]:
    """Decode a ListPodResourcesResponse; numbers and topologies are not read.

    Raises:
        ValueError: the bytes are no such message.
    """
    pods = []
    for part in _framed(data, (1,)).get(1, ()):
        pod = _framed(part, (3,))
        containers = tuple(_listed_container(container) for container in pod.get(3, ()))
        pods.append(ListedPod(_last(pod, 2), _last(pod, 1), containers))
    return pods


def _listed_container(data: bytes) -> ListedContainer:
    fields = _framed(data, (2, 5))
    names = [
        _last(_framed(device, ()), 1)
        for resource in fields.get(5, ())
        for claimed in _framed(resource, (4,)).get(4, ())
        for device in _framed(claimed, (1,)).get(1, ())
    ]
    return ListedContainer(
        _last(fields, 1), [_devices(devices) for devices in fields.get(2, ())], names
    )


def _devices(data: bytes) -> tuple[str, list[str]]:
    """Decode a ContainerDevices; the kubelet sends one for each id."""
    if one := _ONE_DEVICE.fullmatch(data):
        length, resource, id_length, share = one.groups()
        if len(resource) == length[0] and len(share) == id_length[0]:
            return _text(resource), [share.decode()]
    fields = _framed(data, ())
    return _last(fields, 1), [device.decode(errors="replace") for device in fields.get(2, ())]


@lru_cache(maxsize=_CACHED)
def _text(data: bytes) -> str:
    """Decode the name of a resource, which is ASCII."""
    return data.decode()


def _last(fields: Mapping[int, Sequence[bytes]], number: int) -> str:
    """Return a text, of which the last one counts; empty without one."""
    return fields[number][-1].decode(errors="replace") if number in fields else ""


def _framed(data: bytes, messages: Collection[int]) -> dict[int, list[bytes]]:
    """Return the messages and texts in a message, by the numbers of their fields.

    Raises:
        ValueError: the bytes are no message, or one of `messages` is of another kind.
    """
    found: dict[int, list[bytes]] = {}
    at, end = 0, len(data)
    while at < end:
        tag, start = data[at], at + 2
        # Nearly all fields: a tag and a length of one byte each.
        if tag & _ONE_BYTE_FRAMED == _FRAMED < tag and start <= end and data[at + 1] < _SHORT:
            at = start + data[at + 1]
            if at > end:
                raise ValueError("a field is cut off")
        else:
            tag, start = _read_varint(data, at)
            at = _end(data, tag, start)
            if tag & 7 == _FRAMED:
                _, start = _read_varint(data, start)
            if tag >> 3 == 0 or (tag & 7 != _FRAMED and tag >> 3 in messages):
                raise ValueError(f"field {tag >> 3} is of another kind")
            if tag & 7 != _FRAMED:
                continue
        if (values := found.get(tag >> 3)) is None:
            found[tag >> 3] = [data[start:at]]
        else:
            values.append(data[start:at])
    return found


def encode_allocate_response(grants: Iterable[Grant]) -> bytes:
    """Encode an AllocateResponse, one container response for each grant."""
    return b"".join(encode_field(_FIELD_1, _grant(grant)) for grant in grants)


def encode_preferred_response(choices: Iterable[Iterable[str]]) -> bytes:
    """Encode a PreferredAllocationResponse, one container response for each choice."""
    return b"".join(
        encode_field(_FIELD_1, b"".join(encode_text(_FIELD_1, share) for share in choice))
        for choice in choices
    )


def encode_device(share_id: str, *, healthy: bool, numa_node: int | None) -> bytes:
    """Encode one Device as an element of a list: the bytes of several can be joined.

    Without a NUMA node there is no TopologyInfo at all: an empty one makes the kubelet drop the
    device from PodResources.
    """
    return encode_field(
        _FIELD_1, encode_text(_FIELD_1, share_id) + _device_state(healthy, numa_node)
    )


def check_message(data: bytes) -> None:
    """Check that bytes are a message, of whatever fields.

    The generated classes take any bytes for a message, with the fields that they recognize.

    Raises:
        ValueError: the bytes are no message.
    """
    at = 0
    while at < len(data):
        tag, start = _read_varint(data, at)
        at = _end(data, tag, start)
        if tag >> 3 == 0:
            raise ValueError("a field has the number 0")


def _parts(data: bytes) -> list[bytes]:
    """Split a message of repeated field 1 into the field's values."""
    parts = []
    at = 0

    while at < len(data):
        tag, start = _read_varint(data, at)
        stop = _end(data, tag, start)
        if tag == _FIELD_1[0]:
            length, start = _read_varint(data, start)
            parts.append(data[start : start + length])
        at = stop

    return parts


def _container(data: bytes) -> tuple[list[str], list[str], int]:
    """Decode fields 1 and 2 (repeated strings) and 3 (int) of a container request."""
    text = data.decode("latin-1")  # once for all ids: ours are ASCII, others are unknown ids
    # Nearly all of a request is hundreds of short ids, one after the other.
    first = _decode_equal_lengths(data, text)
    at = len(first) * (data[1] + 2) if first else 0
    if not first:
        first, at = _decode_short(text)
    texts: dict[int, list[str]] = {_FIELD_1_TAG: first, _FIELD_2[0]: []}
    size, end = 0, len(data)

    while at < end:
        tag = data[at]
        into = texts.get(tag)

        if into is not None and at + 1 < end and data[at + 1] < _SHORT:
            start = at + 2
            at = start + data[at + 1]
            if at > end:
                raise ValueError("a text is cut off")
            into.append(text[start:at])
            continue

        tag, start = _read_varint(data, at)
        at = _end(data, tag, start)
        if into is not None:
            length, start = _read_varint(data, start)
            into.append(text[start : start + length])
        elif tag == 0x18:  # noqa: PLR2004 - field 3, a varint
            size = _read_varint(data, start)[0]

    return first, texts[_FIELD_2[0]], size


def _decode_equal_lengths(data: bytes, text: str) -> list[str]:
    """Decode the texts of field 1 at the start of a message, if all have one length.

    Up to a hundred shares of a GPU have ids of one length. The bytes after them must be fewer than
    one of them; else no text is decoded. This takes half of the time of `_decode_short`.
    """
    size = data[1] + 2 if len(data) > 1 else 0
    # A head of two equal bytes could be found inside a text.
    if not data.startswith(_FIELD_1) or size in (0, _FIELD_1_TAG + 2) or size > _SHORT + 1:
        return []

    count = len(data) // size
    until = count * size
    if data[:until:size] != data[:1] * count or data[1:until:size] != data[1:2] * count:
        return []
    found = text[2:until].split(text[:2])
    return found if len(found) == count else []


def _decode_short(text: str) -> tuple[list[str], int]:
    """Decode the texts of field 1 at the start, if all have one byte of length.

    No text is decoded if one of them has a line feed, as the tag is: a head that is found inside a
    text has another length than follows it.

    Returns:
        The texts, and where they end.
    """
    before, *parts = _HEAD.split(text)
    heads, found = "".join(parts[::2]), parts[1::2]
    lengths = list(map(len, found))
    if before or not found or max(lengths[:-1], default=0) >= _SHORT:
        return [], 0

    last = ord(heads[-1])
    if last >= _SHORT or last > lengths[-1]:
        return [], 0
    lengths[-1] = last
    if heads != bytes(lengths).decode("latin-1"):
        return [], 0
    found[-1] = found[-1][:last]
    return found, sum(lengths) + 2 * len(lengths)


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    """Return a varint and the position of its end."""
    value = shift = 0

    while True:
        if at >= len(data):
            raise ValueError("a number is cut off")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < _SHORT:
            return value, at
        shift += 7
        if shift >= _WIDEST:
            raise ValueError("a number is too long")


def _end(data: bytes, tag: int, start: int) -> int:
    """Return the end of the field whose value begins at `start`, after its tag."""
    match tag & 7:
        case 0:
            end = _read_varint(data, start)[1]
        case 1:
            end = start + 8
        case 2:
            length, behind = _read_varint(data, start)
            end = behind + length
        case 5:
            end = start + 4
        case kind:
            raise ValueError(f"there is no wire type {kind}")

    if end > len(data):
        raise ValueError("a field is cut off")
    return end


def _varint(value: int) -> bytes:
    if value < _SHORT:
        return _ONE_BYTE[value]  # nearly all values

    out = bytearray()
    while value >= _SHORT:
        out.append(value & 0x7F | _SHORT)
        value >>= 7
    out.append(value)
    return bytes(out)


def encode_field(tag: bytes, body: bytes) -> bytes:
    """Encode a field of a message or a text."""
    size = len(body)
    return tag + (_ONE_BYTE[size] if size < _SHORT else _varint(size)) + body


def encode_text(tag: bytes, text: str) -> bytes:
    """Encode a string field; protobuf omits an empty one."""
    return encode_field(tag, text.encode()) if text else b""


def _map(tag: bytes, entries: Mapping[str, str]) -> bytes:
    return b"".join(
        encode_field(tag, encode_text(_FIELD_1, key) + encode_text(_FIELD_2, value))
        for key, value in entries.items()
    )


@lru_cache(maxsize=_CACHED)
def _device_state(healthy: bool, numa_node: int | None) -> bytes:  # noqa: FBT001 - of a cached function
    """Encode health and NUMA node, which the devices of a GPU have in common."""
    body = encode_text(_FIELD_2, "Healthy" if healthy else "Unhealthy")
    if numa_node is not None:
        node = b"\x08" + _varint(numa_node) if numa_node else b""
        body += encode_field(_FIELD_3, encode_field(_FIELD_1, node))
    return body


@lru_cache(maxsize=_CACHED)
def _mount(container_path: str, host_path: str, read_only: bool) -> bytes:  # noqa: FBT001 - as above
    body = encode_text(_FIELD_1, container_path) + encode_text(_FIELD_2, host_path)
    return encode_field(_FIELD_2, body + (b"\x18\x01" if read_only else b""))


@lru_cache(maxsize=_CACHED)
def _node(container_path: str, host_path: str, permissions: str) -> bytes:
    body = encode_text(_FIELD_1, container_path) + encode_text(_FIELD_2, host_path)
    return encode_field(_FIELD_3, body + encode_text(_FIELD_3, permissions))


def _grant(grant: Grant) -> bytes:
    parts = [_map(_FIELD_1, grant.envs)]

    parts += [
        _mount(mount.container_path, mount.host_path, mount.read_only) for mount in grant.mounts
    ]
    parts += [_node(node.container_path, node.host_path, node.permissions) for node in grant.nodes]
    parts.append(_map(_FIELD_4, grant.annotations))
    parts += [encode_field(_FIELD_5, encode_text(_FIELD_1, name)) for name in grant.cdi_names]
    return b"".join(parts)
