"""Selectors in CEL, as Kubernetes evaluates them."""

import json
import re
from pathlib import Path

import pytest

from metagpu.sim.allocation.selectors import (
    Device,
    SelectorError,
    UnknownSelectorError,
    check_selector,
    selects,
)

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
TEN = "[1, 2, 3, 4, 5, 6, 7, 8, 9, 10]"
DOUBLED = (
    "cel.bind(x0, 'a', "
    + "".join(f"cel.bind(x{number + 1}, x{number} + x{number}, " for number in range(20))
    + f"x20 != ''{')' * 21}"
)
LOOPS = "".join(f"{TEN}.all({name}, " for name in "abcdef") + "a > 0" + ")" * 6


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
        (f"{OURS}.index == 0", "fails on a device: no such key: index"),
        (f"{OURS}.index == 0 || false", "no such key: index"),
        (f"{OURS}.type", "it gives STRING, not BOOL"),
        (f"{OURS}.type < 1", "no such overload"),
        (f"{OURS}.type.matches('(')", "refuses the selector .*missing \\)"),
        (f"{OURS}.driverVersion == '580.65.6'", "values have different types"),
        (f"{OURS}.driverVersion.compareTo(semver('550.127.08')) > 0", "write semver.*, true"),
        (f"{MEMORY} >= quantity('1Gi')", "no matching overload for '_>=_'"),
        (f"{MEMORY}.isLessThan(quantity('40GB'))", "'40GB' is not a quantity"),
        ("device.driver", "it gives STRING, not BOOL"),
        ("device.attribute['a'].b == 1", "device has no field attribute; it has driver,"),
        ("['a', 1] == []", "elements of a list or map have different types"),
        ("true and true", "Syntax error: mismatched input 'and'"),
        ("@comparable(true, true)", "Syntax error"),
        ("dyn({'a': optional.of(1)}).major() == 1", "no such key: kubernetes"),
        ("dyn({'kubernetes': optional.of(1)}).major() == 1", "no such overload"),
        ("dyn({'a': {'b': optional.of({})}}).compareTo(semver('1.0.0')) == 1", "no such key"),
        ("__import__('os').system('true') == 0", "undeclared reference to '__import__'"),
        ("'\ud800' == 'a'", "it is not valid Unicode"),
    ],
)
def test_what_kubernetes_refuses(expression: str, problem: str) -> None:
    """An expression that Kubernetes refuses, or that fails on a device, is an error."""
    with pytest.raises(SelectorError, match=problem):
        selects(expression, DRIVER, DEVICE)


@pytest.mark.parametrize(
    ("expression", "reason"),
    [
        (f"{OURS}.type.find('m.') == 'mi'", r"find\(\) is not evaluated"),
        ("'%s'.format(['a']) == 'a'", r"format\(\) is not evaluated"),
        ("{'a': 1}.transformMap(k, v, v) == {}", r"@mapInsert\(\) is not evaluated"),
        ("has(device.driver)", r"has\(\) of a field"),
        ("cel.bind(it, device, it.driver == 'a')", "device as a whole"),
        ("has(device.attributes.a)", r"has\(\) of a domain"),
        ("(" * 500 + "true" + ")" * 500, "nested too deep"),
        ("{'a': 1, 'a': 1} == {}", "duplicate key"),
        (LOOPS, "Iteration budget exceeded"),
        ("lists.range(1000000000).size() > 1", r"lists.range\(\) is not evaluated"),
        (DOUBLED, "too large"),
        ("'aaaa'.replace('', 'bbbb')" + ".replace('', 'cccc')" * 20 + " != ''", "too large"),
    ],
)
def test_what_is_not_evaluated_is_unknown(expression: str, reason: str) -> None:
    """Nobody is told yes or no about an expression that is not evaluated here."""
    with pytest.raises(UnknownSelectorError, match=reason):
        selects(expression, DRIVER, DEVICE)
    check_selector(expression)


WHOLE = {
    "attributes": {
        "type": {"string": "gpu"},
        "uuid": {"string": "GPU-a"},
        "productName": {"string": "NVIDIA H100 80GB HBM3"},
        "brand": {"string": "Nvidia"},
        "architecture": {"string": "Hopper"},
        "cudaComputeCapability": {"version": "9.0.0"},
        "driverVersion": {"version": "580.65.6"},
        "cudaDriverVersion": {"version": "13.0.0"},
        "resource.kubernetes.io/pcieRoot": {"string": "pci0000:00"},
        "pciBusID": {"string": "0000:07:00.0"},
    },
    "capacity": {"memory": {"value": "81559Mi"}},
}
FRACTION = {
    "allowMultipleAllocations": True,
    "attributes": {
        "type": {"string": "fraction"},
        "index": {"int": 3},
        "healthy": {"bool": True},
        "off": {"bool": False},
        "neg": {"int": -5},
        "empty": {"string": ""},
        "ver": {"version": "1.2.3-rc.1+b"},
        "uni": {"string": "Größe 😀"},
        "gpu.nvidia.com/uuid": {"string": "GPU-60191ee1-f437-565c-ab0f-914032019dc5"},
        "resource.kubernetes.io/pcieRoot": {"string": "pci0000:00"},
        "resource.kubernetes.io/numaNode": {"int": 1},
    },
    "capacity": {
        "shares": {"value": "100"},
        "memory": {"value": "1.5Gi"},
        "milli": {"value": "1500m"},
        "other.com/cores": {"value": "12"},
    },
}
DEVICES: dict[str, tuple[str, Device]] = {
    "whole": ("gpu.nvidia.com", WHOLE),
    "fraction": (DRIVER, FRACTION),
}
"""The devices of the recorded answers, with their drivers."""
DEVIATIONS = (
    (r"driverVersion\.size\(\)", "a version is a map here"),
    (r"in device\S+\.ver$", "a version is a map here"),
    (r"^\[device\S+driverVersion\] == ", "Kubernetes takes any two such lists for equal"),
    (r"\?ver == optional", "Kubernetes fails for a version in an optional value"),
    (r"isQuantity\('1e100'\)", "Kubernetes takes the largest quantity for it"),
    (r"== quantity\S+\.(add|sub)\(", "a sum on the right of == fails in Kubernetes"),
    (r"memory\.(as|is)Integer|1\.5Gi'\)\.asInteger|500m'\)\)\.isI", "1.5Gi is no integer there"),
    (r"'\\\\C'", "RE2 in C++ knows \\C, in Go it does not"),
    (r"1e400", "no double there, infinite here"),
    (r"indexOf\('c', 4\)", "an index behind the end is an error here"),
    (r"''\.split\(''\)|split\(device\S+empty\)", "nothing split by nothing is one text here"),
    (r"BoolValue", "no bool there"),
    (r"`index`", "quoted names are no syntax there"),
)
"""Expressions whose answers differ, and why."""
UNKNOWN = re.compile(
    r"\b(?:range|find|findAll|includes|ip|isIP|cidr|isCIDR|url|isURL|sum|max|min|isSorted)\("
    r"|unwrap|format|transformMap|\['a','b'\]\.(?:indexOf|lastIndexOf)|has\(device\.\w+\)"
    r"|has\(device.attributes\.nope\)|^device$|^device == |, device,"
    r"|^device\[|'a': 1, 'a': 2|\({40}|1(?:\+1){40}|bind\(device|all\(device"
)
"""Expressions that are not evaluated."""


def own_answer(name: str, expression: str) -> str:
    """Return true, false, error, or unknown."""
    try:
        return str(selects(expression, *DEVICES[name])).lower()
    except SelectorError:
        return "error"
    except UnknownSelectorError:
        return "unknown"


def test_answers_are_those_of_kubernetes() -> None:
    """Every answer is Kubernetes' own, unknown, or on the list of deviations.

    The answers are those of dynamic-resource-allocation 0.36.3, of 2026-11-29.
    """
    file, differing = Path(__file__).with_name("kubernetes_cel_answers.jsonl"), []
    for line in file.read_text().splitlines():
        name, expression, expected = json.loads(line).values()
        wanted = "error" if expected.endswith("ERROR") else expected
        if UNKNOWN.search(expression):
            wanted = "unknown"
        found = own_answer(name, expression)
        listed = any(re.search(pattern, expression) for pattern, _ in DEVIATIONS)
        if found != wanted and not listed:
            differing.append((expression, expected, found))
    assert not differing, differing


def test_users_read_each_deviation() -> None:
    """The page about other projects' files prints the list, with its reasons."""
    page = Path("docs/development/compat.md").read_text()
    assert [reason for _, reason in DEVIATIONS if reason not in page] == []


def test_every_deviation_deviates() -> None:
    """An entry of the list that has become superfluous is removed."""
    file = Path(__file__).with_name("kubernetes_cel_answers.jsonl")
    answers = [tuple(json.loads(line).values()) for line in file.read_text().splitlines()]
    for pattern, _ in DEVIATIONS:
        concerned = [answer for answer in answers if re.search(pattern, answer[1])]
        assert any(own_answer(value[0], value[1]) not in value[2].lower() for value in concerned), (
            pattern
        )
