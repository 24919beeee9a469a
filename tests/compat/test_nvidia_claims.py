"""GpuConfig and MigDeviceConfig of NVIDIA's DRA driver: what they ask for, and what is refused.

The manifests are those of its repository (`demo/specs/quickstart`), written anew as facts.
"""

from collections.abc import Sequence
from typing import Any

import pytest

from metagpu.compat.nvidia_claims import read_sharing
from metagpu.core.config.errors import ConfigError
from metagpu.core.model.resource_claims import (
    AllocatedPart,
    ClaimSharing,
    MpsLimits,
    OpaqueParameters,
)

TS, MPS = AllocatedPart("ts-gpu", "gpu", "GPU-a"), AllocatedPart("mps-gpu", "gpu", "GPU-b")
MIG = AllocatedPart("mig", "mig", "GPU-c")
LIMIT = "defaultPinnedDeviceMemoryLimit"
PER_DEVICE = "defaultPerDevicePinnedMemoryLimit"


def config(kind: str = "GpuConfig", **sharing: Any) -> dict[str, Any]:  # noqa: ANN401 - any JSON
    """Write parameters of a kind; without `sharing` a device as it is."""
    made: dict[str, Any] = {"apiVersion": "resource.nvidia.com/v1beta1", "kind": kind}
    return {**made, "sharing": sharing} if sharing else made


def mps(**limits: object) -> dict[str, Any]:
    """Write a GpuConfig with the strategy MPS."""
    return config(strategy="MPS", mpsConfig=limits)


def slices(interval: str) -> dict[str, Any]:
    """Write a GpuConfig with the strategy TimeSlicing."""
    return config(strategy="TimeSlicing", timeSlicingConfig={"interval": interval})


def entry(parameters: object, *requests: str, from_class: bool = False) -> OpaqueParameters:
    """Write an entry of an allocation's `config`."""
    return OpaqueParameters(parameters, requests, from_class)


def settings(*configs: OpaqueParameters, of: Sequence[AllocatedPart]) -> list[str | None]:
    """Return the backend and settings of each device, `None` for a device as it is."""
    found = read_sharing(configs, of)
    return [
        None if sharing is None else f"{sharing.backend} {sharing.settings}" for sharing in found
    ]


def test_two_requests_of_one_claim_are_shared_in_different_ways() -> None:
    """As in NVIDIA's gpu-test5: one GPU by long time-slices, one by MPS with limits."""
    found = read_sharing(
        [
            entry(slices("Long"), "ts-gpu"),
            entry(mps(defaultActiveThreadPercentage=50, **{LIMIT: "10Gi"}), "mps-gpu"),
        ],
        [TS, MPS],
    )
    assert found == [
        ClaimSharing("timeslice", "sharing.timeSlicingConfig.interval: Long", "long"),
        ClaimSharing("mps", "sharing.strategy: MPS", "50-10240"),
    ]
    assert MpsLimits.parse("50-10240") == MpsLimits(50, 10240)
    assert MpsLimits.parse(MpsLimits().settings) == MpsLimits()


def test_the_claim_wins_over_the_class_and_later_over_earlier() -> None:
    """An entry is for the requests that it names, with all their alternatives, or for all."""
    by_class = entry(slices("Long"), "ts-gpu", from_class=True)
    short, medium = entry(slices("Short")), entry(slices("Medium"))
    either = AllocatedPart("ts-gpu/large", "gpu", "GPU-a")
    assert settings(by_class, of=[TS, MPS]) == ["timeslice long", None]
    assert settings(short, by_class, of=[TS]) == ["timeslice short"]
    assert settings(medium, short, of=[TS]) == ["timeslice short"]
    assert settings(entry(slices("Long"), "ts-gpu"), of=[either]) == ["timeslice long"]
    assert settings(entry(slices("Long"), "ts-gpu/small"), of=[either]) == [None]


def test_parameters_that_ask_for_nothing() -> None:
    """A device as it is: also a MIG device by time-slices, whose length is the GPU's."""
    by_time = config("MigDeviceConfig", strategy="TimeSlicing")
    assert settings(entry(config()), of=[TS]) == [None]
    assert settings(entry(slices("Long")), entry(by_time), of=[TS, MIG]) == ["timeslice long", None]
    [default] = read_sharing([entry(config(strategy="TimeSlicing"))], [TS])
    assert default is not None
    assert (default.settings, default.required) == ("default", False)


def test_limits_of_one_gpu_win() -> None:
    """They name it by its uuid, or by its place among the GPUs of the configuration."""
    limits = {LIMIT: "1Gi", PER_DEVICE: {"0": "2Gi", "GPU-b": "3500000000"}}
    assert settings(entry(mps(**limits)), of=[TS, MPS]) == ["mps -2048", "mps -3337"]


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({"defaultActiveThreadPercentage": 0}, "mps "),
        ({"multiUser": None, "defaultActiveThreadPercentage": None, LIMIT: None}, "mps "),
        ({LIMIT: "5e9"}, "mps -4768"),
        ({LIMIT: 5e9}, "mps -4768"),
        ({LIMIT: 5000000000}, "mps -4768"),
        ({LIMIT: "2500M", PER_DEVICE: None}, "mps -2384"),
        ({LIMIT: "2500000k"}, "mps -2384"),
    ],
)
def test_what_nvidia_takes_is_taken(limits: dict[str, object], expected: str) -> None:
    """Nulls, a percentage of 0, and quantities in all of Kubernetes' spellings."""
    assert settings(entry(mps(**limits)), of=[TS]) == [expected]


@pytest.mark.parametrize(
    ("parameters", "problem"),
    [
        ({**config(), "sharingg": {}}, "sharingg: unknown key"),
        (mps(default_limit=1), "sharing.mpsConfig.default_limit: unknown key"),
        (slices("Huge"), "sharing.timeSlicingConfig.interval: 'Huge'"),
        (config(strategy="Fabric"), "sharing.strategy: 'Fabric'"),
        (config("VfioDeviceConfig"), "kind: 'VfioDeviceConfig' is not served"),
        ({**config(), "kind": ["GpuConfig"]}, "kind: ['GpuConfig'] is not served"),
        ({"kind": "GpuConfig"}, "apiVersion: None; allowed: resource.nvidia.com/v1beta1"),
        ("GpuConfig", "apiVersion: None"),
        ({**slices("Long"), "kind": "MigDeviceConfig"}, "sharing.timeSlicingConfig: unknown key"),
        (config(strategy="TimeSlicing", mpsConfig={}), "sharing.mpsConfig: the strategy is"),
        (config(strategy="MPS", timeSlicingConfig={}), "sharing.timeSlicingConfig: the strategy"),
        (config("MigDeviceConfig"), "kind: MigDeviceConfig is for devices of type mig, and"),
        (mps(defaultActiveThreadPercentage=101), "Percentage: 101; allowed: 0 to 100"),
        (mps(defaultActiveThreadPercentage=-1), "Percentage: -1; allowed: 0 to 100"),
        (mps(**{LIMIT: "-5e9"}), f"{LIMIT}: '-5e9' is not an amount"),
        (mps(**{LIMIT: "100Ki"}), f"{LIMIT}: 102400 bytes; allowed: 1Mi to 1024Ti"),
        (mps(**{LIMIT: "9" * 300}), f"{LIMIT}: '9999"),
        (mps(**{PER_DEVICE: {"7": "1Gi"}}), f"{PER_DEVICE}.7: no GPU of the claim"),
        (mps(multiUser=True), "sharing.mpsConfig.multiUser: servers for several users"),
    ],
)
def test_what_is_not_followed_is_refused_with_its_path(parameters: object, problem: str) -> None:
    """The author of the claim reads which field, and what is allowed."""
    with pytest.raises(ConfigError) as error:
        read_sharing([entry(parameters, "ts-gpu")], [TS])
    assert problem in str(error.value)


def test_mps_is_for_one_gpu_of_a_request() -> None:
    """A container has one control daemon, and ours are one for each GPU."""
    pair = [TS, AllocatedPart("ts-gpu", "gpu", "GPU-b")]
    with pytest.raises(ConfigError, match="ts-gpu has 2"):
        read_sharing([entry(mps())], pair)
    with pytest.raises(ConfigError, match="not served on a MIG device"):
        read_sharing([entry(config("MigDeviceConfig", strategy="MPS"))], [MIG])
