"""Any file is a configuration or is refused as one."""

from collections.abc import Callable
from typing import Any

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from metagpu.core.config.config import DEFAULT, parse
from metagpu.core.config.errors import ConfigError
from metagpu.core.grants.injection import DeviceListStrategy, Injection
from metagpu.core.model.xid_severity import Severity
from tests.core.config.config_texts import TWO_BACKENDS

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-3, 10**25)
    | st.floats()
    | st.dates()
    | st.text(max_size=8)
    | st.sampled_from(["all", "fraction", "envvar", "cdi-cri", "metagpu/v1", "1Gi", "30s", "0-3"])
)
KEYS = st.sampled_from(
    [
        *[
            "version",
            "pools",
            "health",
            "deviceListStrategy",
            "passDeviceSpecs",
            "cdiKind",
            "migStrategy",
        ],
        *["name", "gpus", "backends", "index", "uuid", "pci", "product", "minMemory"],
        *["quietPeriod", "rescanPeriod", "xids", "backend", "resource", "sharesPerGpu"],
        *["memoryUnit", "placement", "split", "metagpuEnv"],
    ]
)
ODD_KEYS = KEYS | st.integers(0, 100) | st.text(max_size=4) | st.none() | st.booleans()
ANYTHING = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(ODD_KEYS, inner, max_size=4),
)


def almost(**keys: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Make mappings with the right keys, whose values are mostly of the right kind."""
    return st.fixed_dictionaries({}, optional={k: v | ANYTHING for k, v in keys.items()})


TEXTS = st.sampled_from(["0-3", "*A100*", "GPU-x", "1Gi", "nothing"])
A_BACKEND = almost(
    backend=st.just("fraction"),
    resource=st.sampled_from(["cnvrg.io/metagpu", "a.b/c", "d"]),
    sharesPerGpu=st.integers(-1, 200),
    memoryUnit=st.sampled_from(["1Gi", "1Ki", 2**30]),
    placement=st.sampled_from(["binpack", "spread", "pack"]),
    split=st.sampled_from(["refuse", "accept", "ask"]),
    metagpuEnv=st.booleans(),
)
A_POOL = almost(
    name=st.sampled_from(["a", "b"]),
    backends=st.lists(A_BACKEND, max_size=2),
    gpus=st.just("all")
    | almost(index=TEXTS, uuid=TEXTS, pci=TEXTS, product=TEXTS, minMemory=TEXTS),
    api=st.sampled_from(["device-plugin", "dra"]),
)
DOCUMENTS = almost(
    version=st.just("metagpu/v1"),
    pools=st.lists(A_POOL, max_size=3),
    health=almost(
        quietPeriod=st.sampled_from(["30s", "1d", 3]),
        rescanPeriod=st.sampled_from(["30s", "1d", 3]),
        xids=st.dictionaries(st.integers(0, 200), st.sampled_from(list(Severity))),
    ),
    deviceListStrategy=st.sampled_from(list(DeviceListStrategy)).map(str),
    passDeviceSpecs=st.booleans(),
    cdiKind=st.sampled_from(["nvidia.com/gpu"]),
    migStrategy=st.sampled_from(["single", "mixed"]),
)


def ends_well(text: str) -> None:
    """Read a text; raise anything but a Config or a ConfigError of one file."""
    try:
        read = parse(text, "f.yaml", TWO_BACKENDS)
    except ConfigError as error:
        assert str(error).startswith("f.yaml: ")  # noqa: PT017 - either end is a good one
    else:
        assert read.build_backends(Injection())


@given(DOCUMENTS | ANYTHING)
def test_any_mapping_is_a_config_or_a_config_error(document: object) -> None:
    """Reading any mapping ends in a Config or in a ConfigError."""
    ends_well(yaml.dump(document, allow_unicode=True))


TOKENS = st.sampled_from(
    [
        *":-[]{},&*!|>'\"#%@`\n\t a0?~=.+_\\",
        *["<<", "---", "...", ": ", "- "],
        *["\n  ", "&a ", "*a ", "!!int ", "!!float ", "!!bool ", "!!timestamp ", "!!binary "],
        *[
            "!!set ",
            "!!omap ",
            "2001-02-31",
            "0x_",
            "0b_",
            ".inf",
            "1:99",
            "\ud800",
            "\0",
            "\ufeff",
        ],
        *["version: metagpu/v1\n", "pools:\n", "  - name: a\n", "    backends: ", "xids: "],
    ]
)


@given(st.lists(TOKENS, max_size=30).map("".join))
@example("!!float ''")
@example("!!bool maybe")
@example("!!timestamp never")
@example("!!set {a, b}")
@example("pools: !!set {a, b}\nversion: metagpu/v1")
def test_any_text_is_a_config_or_a_config_error(text: str) -> None:
    """Reading any text ends in a Config or in a ConfigError."""
    ends_well(text)


MUTATIONS: list[Callable[[str, int], str]] = [
    lambda text, at: text[:at],
    lambda text, at: text[:at] + text[at + 1 :],
    lambda text, at: text[:at] + ":" + text[at:],
    lambda text, at: text[:at] + "\n" + text[at:],
    lambda text, at: text[:at] + "7" + text[at + 1 :],
]


@pytest.mark.parametrize("mutation", range(len(MUTATIONS)))
def test_any_slip_of_the_default_is_a_config_or_a_config_error(mutation: int) -> None:
    """The default file with one slip at any place is read, or refused with our message."""
    for at in range(len(DEFAULT)):
        ends_well(MUTATIONS[mutation](DEFAULT, at))
