"""The messages that refuse a file of NVIDIA's device plugin."""

import pytest

from tests.compat.nvidia_texts import SLICES, slices
from tests.compat.rig import refusal


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "version: v2\nsharing: {}",
            "f.yaml: 1: version: 'v2' is not known here; allowed: v1",
        ),
        (
            "version: v1\nsharing: {timeSlicing: {resources: []}}",
            "f.yaml: 2: sharing.timeSlicing.resources: there is no resource; give at least one",
        ),
        (
            SLICES.replace("      replicas: 4\n", ""),
            "f.yaml: 5: sharing.timeSlicing.resources[0]: missing key `replicas`",
        ),
        (
            SLICES.replace("4", "0"),
            (
                "f.yaml: 6: sharing.timeSlicing.resources[0].replicas: replicas is 0; allowed: 1 "
                "to 100000"
            ),
        ),
        (
            slices("      devices: some\n"),
            (
                "f.yaml: 7: sharing.timeSlicing.resources[0].devices: 'some' is not known here; "
                "write "
                '"all", a number of GPUs, or a list of indices and uuids'
            ),
        ),
        (
            slices("      devices: 0\n"),
            (
                "f.yaml: 7: sharing.timeSlicing.resources[0].devices: 0 GPUs are none; write "
                '"all", a number of GPUs, or a list of indices and uuids'
            ),
        ),
        (
            slices("      devices: []\n"),
            (
                "f.yaml: 7: sharing.timeSlicing.resources[0].devices: no device is named; write "
                '"all", a number of GPUs, or a list of indices and uuids'
            ),
        ),
        (
            slices("      devices: [GPU-1]\n"),
            (
                "f.yaml: 7: sharing.timeSlicing.resources[0].devices[0]: 'GPU-1' is no device; "
                "write an index such as 0, or a uuid such as "
                "GPU-5f2e1a3c-0000-0000-0000-00000000beef"
            ),
        ),
        (
            "version: v1\nflags: {migStrategy: some}",
            "f.yaml: 2: flags.migStrategy: 'some' is not known here; allowed: mixed, none, single",
        ),
        (
            "version: v1\nflags: {plugin: {deviceListStrategy: [envvar, magic]}}",
            (
                "f.yaml: 2: flags.plugin.deviceListStrategy: 'magic' is not known here; allowed: "
                "cdi-annotations, cdi-cri, envvar, volume-mounts"
            ),
        ),
    ],
)
def test_a_mistake_is_refused_with_the_operators_own_line(text: str, message: str) -> None:
    """Each refusal names file, line and path in the file as the operator wrote it."""
    assert refusal(text) == message


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("MIG_STRATEGY", "some", "'some' is not known here; allowed: mixed, none, single"),
        (
            "SHARED_DEVICES_ALLOCATION_POLICY",
            "any",
            "'any' is not known here; allowed: distributed, packed",
        ),
        ("PASS_DEVICE_SPECS", "perhaps", "'perhaps' is neither true nor false"),
    ],
)
def test_a_wrong_variable_is_named(variable: str, value: str, message: str) -> None:
    """A variable with a wrong value is refused by its name."""
    refused = refusal("version: v1", environment={variable: value})

    assert refused == f"environment: {variable}: {message}"
