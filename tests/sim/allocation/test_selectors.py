"""Selectors in CEL, as far as the simulated scheduler reads them."""

import pytest

from metagpu.sim.allocation.amounts import AllocationError
from metagpu.sim.allocation.selectors import selects

DRIVER = "gpu.metagpu.io"
DEVICE = {
    "name": "gpu-1",
    "allowMultipleAllocations": True,
    "attributes": {
        "type": {"string": "mig"},
        "profile": {"string": "1g.5gb"},
        "resource.kubernetes.io/numaNode": {"int": 1},
        "healthy": {"bool": True},
        "driverVersion": {"version": "580.65.6"},
    },
    "capacity": {"memory": {"value": "40Gi"}},
}
OURS = f"device.attributes['{DRIVER}']"
MEMORY = f"device.capacity['{DRIVER}'].memory"


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("true", True),
        (f"device.driver == '{DRIVER}'", True),
        (f'device.driver != "{DRIVER}"', False),
        (f"device.driver == '{DRIVER}' && {OURS}.type == 'gpu'", False),
        (f"{OURS}.type == 'gpu' || {OURS}.type == 'mig'", True),
        (f"!({OURS}.type == 'gpu')", True),
        (f"!{OURS}.healthy", False),
        (f"{OURS}.type\n  == 'mig'", True),
        (f"{OURS}['type'] in ['gpu', 'mig']", True),
        (f"'index' in {OURS}", False),
        (f"has({OURS}.index)", False),
        (f"has({OURS}.index) && {OURS}.index == 0", False),
        (f"{OURS}.index == 0 || {OURS}.type == 'mig'", True),
        (f"{OURS}.index == 0 && {OURS}.type == 'gpu'", False),
        ("device.attributes['resource.kubernetes.io'].numaNode >= 1", True),
        ("has(device.attributes['dra.example.com'].model)", False),
        (f"{OURS}.profile.matches('^1g')", True),
        (f"{OURS}.profile.startsWith('2g')", False),
        (f"{OURS}.profile.lowerAscii().contains('5GB'.lowerAscii())", True),
        (f"{OURS}.healthy == 1", False),
        ("'a && b' == 'a && b'", True),
        ("device.allowMultipleAllocations", True),
        (f"{MEMORY}.compareTo(quantity('30Gi')) >= 0", True),
        (f"{MEMORY}.isLessThan(quantity('30Gi'))", False),
        (f"{MEMORY} == quantity('40960Mi')", True),
        (f"{OURS}.driverVersion.isGreaterThan(semver('570.0.0'))", True),
    ],
)
def test_a_selector(expression: str, expected: object) -> None:
    """A selector has the value that CEL gives it."""
    assert selects(expression, DRIVER, DEVICE) is expected


@pytest.mark.parametrize(
    ("expression", "problem"),
    [
        (f"{OURS}.index == 0", "no such key: index"),
        (f"{OURS}.index == 0 || false", "no such key: index"),
        (f"{OURS}.type", "is not a condition"),
        (f"{OURS}.type && true", "is not a condition"),
        (f"{OURS}.type < 1", "no such overload"),
        (f"{OURS}.type.matches('(')", "cannot be made"),
        ("true ? true : false", "does not read"),
        ("[x for x in [1]] == [1]", "does not read"),
        ("__import__('os').system('true') == 0", "does not read"),
        ("device.__class__ == 1", "no such key: __class__"),
        ("device.driver ==", "does not read"),
        ("size(1) == 1", "cannot be made"),
        ("semver(1) == 1", "cannot be made"),
        ("has(device.driver.name)", "no such key: name"),
        ("device.attributes[['a']] == 1", "no such key"),
        ("(" * 500 + "true" + ")" * 500, "does not read"),
        ("!" * 3000 + "true", "does not read"),
    ],
)
def test_what_is_no_selector(expression: str, problem: str) -> None:
    """Expressions that are no CEL, or not of its part here, are refused."""
    with pytest.raises(AllocationError, match=problem):
        selects(expression, DRIVER, DEVICE)
