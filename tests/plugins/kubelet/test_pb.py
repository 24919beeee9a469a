"""The generated messages: their bytes, as the kubelet's names are not Python's."""

import betterproto2
import pytest

from metagpu.plugins.kubelet.pb import v1, v1alpha1, v1beta1

TEXT = b"\x0a\x01"  # field 1, length-delimited, one byte long


@pytest.mark.parametrize(
    ("message", "wire"),
    [
        (v1beta1.Device(id="a", health="h"), TEXT + b"a\x12\x01h"),
        (v1beta1.NumaNode(id=1), b"\x08\x01"),
        (v1beta1.TopologyInfo(nodes=[v1beta1.NumaNode(id=1)]), b"\x0a\x02\x08\x01"),
        (
            v1beta1.ContainerPreferredAllocationResponse(device_i_ds=["a", "b"]),
            b"\x0a\x01a\x0a\x01b",
        ),
        (
            v1beta1.ContainerPreferredAllocationRequest(
                available_deviceIDs=["a"], must_include_deviceIDs=["b"], allocation_size=3
            ),
            TEXT + b"a\x12\x01b\x18\x03",
        ),
        (v1beta1.ContainerAllocateRequest(devices_ids=["a"]), TEXT + b"a"),
        (v1beta1.PreStartContainerRequest(devices_ids=["a"]), TEXT + b"a"),
        (v1beta1.CdiDevice(name="a"), TEXT + b"a"),
        (v1beta1.ContainerAllocateResponse(envs={"k": "v"}), b"\x0a\x06\x0a\x01k\x12\x01v"),
        (
            v1beta1.ContainerAllocateResponse(cdi_devices=[v1beta1.CdiDevice(name="a")]),
            b"\x2a\x03\x0a\x01a",
        ),
        (v1.ContainerDevices(resource_name="a", device_ids=["b"]), TEXT + b"a\x12\x01b"),
        (v1.ClaimResource(share_id=""), b"\x2a\x00"),
        (v1alpha1.ContainerDevices(resource_name="a", device_ids=["b"]), TEXT + b"a\x12\x01b"),
    ],
)
def test_messages_are_the_kubelets_bytes_both_ways(
    message: betterproto2.Message, wire: bytes
) -> None:
    """Each message whose names differ from Python's encodes and decodes as kubelet.md §1.1 says."""
    assert bytes(message) == wire
    assert type(message).parse(wire) == message


def test_an_absent_topology_is_not_an_empty_one() -> None:
    """The kubelet treats the two differently, so presence survives the round trip."""
    absent = v1beta1.Device(id="a")
    empty = v1beta1.Device(id="a", topology=v1beta1.TopologyInfo())
    assert v1beta1.Device.parse(bytes(absent)).topology is None
    assert v1beta1.Device.parse(bytes(empty)).topology == v1beta1.TopologyInfo()


def test_unset_strings_arrive_as_empty_ones() -> None:
    """A field with its zero value is not on the wire at all."""
    assert bytes(v1beta1.Device(id="", health="")) == b""
    assert v1beta1.Device.parse(b"").health == ""


@pytest.mark.parametrize(
    ("base", "methods"),
    [
        (v1beta1.RegistrationBase, {"/v1beta1.Registration/Register"}),
        (
            v1beta1.DevicePluginBase,
            {
                "/v1beta1.DevicePlugin/GetDevicePluginOptions",
                "/v1beta1.DevicePlugin/ListAndWatch",
                "/v1beta1.DevicePlugin/GetPreferredAllocation",
                "/v1beta1.DevicePlugin/Allocate",
                "/v1beta1.DevicePlugin/PreStartContainer",
            },
        ),
        (
            v1.PodResourcesListerBase,
            {
                "/v1.PodResourcesLister/List",
                "/v1.PodResourcesLister/GetAllocatableResources",
                "/v1.PodResourcesLister/Get",
            },
        ),
        (v1alpha1.PodResourcesListerBase, {"/v1alpha1.PodResourcesLister/List"}),
    ],
)
def test_services_answer_at_the_kubelets_paths(
    base: type[
        v1beta1.RegistrationBase
        | v1beta1.DevicePluginBase
        | v1.PodResourcesListerBase
        | v1alpha1.PodResourcesListerBase
    ],
    methods: set[str],
) -> None:
    """A gRPC method is found by its package, service and name alone."""
    assert base().__mapping__().keys() == methods
