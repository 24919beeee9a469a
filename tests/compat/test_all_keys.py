"""Every key of every format is honoured, or one note describes its lost effect."""

import copy
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import msgspec
import pytest
import yaml

from metagpu.compat import cnvrg, hami, mig_parted, nvidia_file, variables
from metagpu.compat.contract import ConvertedConfig
from metagpu.compat.keys import IgnoredKey
from metagpu.core.config.errors import ConfigError
from tests.compat.rig import FILE_STRUCTS, converted
from tests.rigs.build import gpu

StructType = msgspec.inspect.StructType


def fields(info: msgspec.inspect.Type) -> Mapping[str, msgspec.inspect.Type]:
    """Return the honoured keys of a type, in lists and unions too."""
    if isinstance(info, StructType):
        return {field.encode_name: field.type for field in info.fields}
    if isinstance(info, msgspec.inspect.UnionType):
        return {key: inner for member in info.types for key, inner in fields(member).items()}
    item = getattr(info, "item_type", None)
    return {} if item is None else fields(item)


@pytest.mark.parametrize("form", [cnvrg, hami, nvidia_file], ids=lambda form: form.__name__)
def test_a_key_is_honoured_or_has_a_note_and_not_both(form: ModuleType) -> None:
    """A key with a note stands in a mapping that is read, and is not read itself."""
    table: Mapping[str, IgnoredKey] = form.IGNORED_KEYS
    root = FILE_STRUCTS[form]

    assert all(isinstance(ignored, IgnoredKey) for ignored in table.values())
    for path in table:
        *parents, key = path.split(".")
        known = fields(msgspec.inspect.type_info(root))
        for parent in parents:
            assert parent in known, path
            known = fields(known[parent])
        assert key not in known, path


def test_variables_of_nvidia_name_keys_that_have_a_note() -> None:
    """A variable without effect has the note of its flag's key."""
    assert set(variables.VARIABLES_OF_FLAGS.values()) <= set(nvidia_file.IGNORED_KEYS)


HONOURED: Final = ""
SO_ANYWAY: Final = "."
DROPPED: Final = "has no effect, as in NVIDIA's plugin, which drops it"
GEOMETRY: Final = [{"models": ["A"], "allowedGeometries": [[{"name": "1g.5gb", "count": 7}]]}]
OTHER_GEOMETRY: Final = [
    {"models": ["A"], "allowedGeometries": [[{"name": "2g.10gb", "count": 3}]]}
]
ALLOWED: Final = [{"models": ["A"], "profiles": ["1g.5gb"]}]
LAYOUT: Final[dict[str, Any]] = {
    "mig-configs": {"a": [{"mig-enabled": True, "devices": "all", "mig-devices": {"1g.5gb": 7}}]}
}
EMPTY: Final[dict[str, Any]] = {
    "mig-configs": {"a": [{"mig-enabled": True, "devices": "all", "mig-devices": {}}]}
}

Base = Mapping[str, Any]

CNVRG: Final[Base] = {
    "deviceSharing": [{"resourceName": "a.b/c", "uuid": ["*"], "metagpusPerGpu": 8}]
}
OLDER: Final[Base] = {"resourceName": "a.b/c", "metaGpus": 2, "accelerator": "nvidia"}
NVIDIA: Final[Base] = {
    "sharing": {"timeSlicing": {"resources": [{"name": "nvidia.com/gpu", "replicas": 4}]}}
}
MPS: Final[Base] = {"sharing": {"mps": {"resources": [{"name": "nvidia.com/gpu", "replicas": 4}]}}}
HAMI: Final[Base] = {"nvidia": {}, "nodeconfig": [{"name": "n"}]}
OWN: Final[Base] = {"nvidia": {}, "nodeconfig": [{"name": "n", "operatingmode": "mps"}]}
CUT: Final[Base] = {
    "nvidia": {"migProfileAllowlist": ALLOWED},
    "nodeconfig": [{"name": "n", "operatingmode": "mig"}],
}
KNOWN: Final[Base] = {
    "nvidia": {"knownMigGeometries": GEOMETRY},
    "nodeconfig": [{"name": "n", "operatingmode": "mig"}],
}

KEYS: Final[Mapping[ModuleType, list[tuple[Base, str, Any, str]]]] = {
    cnvrg: [
        (CNVRG, "accelerator", "amd", HONOURED),
        (OLDER, "resourceName", "a.b/d", HONOURED),
        (OLDER, "autoReshare", True, HONOURED),
        (OLDER, "metaGpus", 3, HONOURED),
        (CNVRG, "processesDiscoveryPeriod", 5, "had none in MetaGPU either"),
        (CNVRG, "deviceCacheTTL", 3600, "set how often GPUs are read"),
        (CNVRG, "jwtSecret", "x", "signed tokens"),
        (CNVRG, "deviceToken", "x", "named a token of the operator's"),
        (CNVRG, "containerToken", "x", "given a token to containers"),
        (CNVRG, "mgctlTar", "/opt/mgctl", "named the program that is copied into containers"),
        (CNVRG, "mgctlAutoInject", True, HONOURED),
        (CNVRG, "serverAddr", "0.0.0.0:50052", "served MetaGPU's API on TCP"),
        (CNVRG, "memoryEnforcer", True, HONOURED),
        (CNVRG, "nodename", "n", "identified pods of this node"),
        (CNVRG, "config", "/etc", "named the folder of this file"),
        (CNVRG, "verbose", True, "logged more"),
        (CNVRG, "json-log", True, "logged JSON"),
        (CNVRG, "deviceSharing[0].resourceName", "a.b/d", HONOURED),
        (CNVRG, "deviceSharing[0].uuid", [gpu(0).id], HONOURED),
        (CNVRG, "deviceSharing[0].autoReshare", True, HONOURED),
        (CNVRG, "deviceSharing[0].metagpusPerGpu", 9, HONOURED),
        (CNVRG, "deviceSharing[0].metaGpus", 2, "has no effect, as in MetaGPU: metagpusPerGpu is"),
    ],
    nvidia_file: [
        (NVIDIA, "version", "v2", HONOURED),
        (NVIDIA, "flags.migStrategy", "mixed", HONOURED),
        ({**NVIDIA, **LAYOUT}, "flags.migStrategy", "single", HONOURED),
        (NVIDIA, "flags.failOnInitError", False, "decided whether to end without NVML"),
        (NVIDIA, "flags.mpsRoot", "/mps", "set where NVIDIA's MPS daemon is"),
        (NVIDIA, "flags.nvidiaDriverRoot", "/d", "set where the driver is"),
        (NVIDIA, "flags.nvidiaDevRoot", "/d", "set where the driver is"),
        (NVIDIA, "flags.gdrcopyEnabled", True, "given containers GDRCopy's devices"),
        (NVIDIA, "flags.gdsEnabled", True, "given containers GPUDirect Storage's devices"),
        (NVIDIA, "flags.mofedEnabled", True, "given containers Mellanox' devices"),
        (NVIDIA, "flags.useNodeFeatureAPI", True, "published labels as a NodeFeature"),
        (NVIDIA, "flags.deviceDiscoveryStrategy", "tegra", "looked for GPUs in another way"),
        (NVIDIA, "flags.gfd", {"oneshot": True}, "shaped GPU Feature Discovery's labels"),
        (NVIDIA, "flags.plugin.passDeviceSpecs", False, HONOURED),
        (NVIDIA, "flags.plugin.deviceListStrategy", "cdi-cri", HONOURED),
        (NVIDIA, "flags.plugin.deviceIDStrategy", "index", "named GPUs by index"),
        (NVIDIA, "flags.plugin.cdiAnnotationPrefix", "a.b/", "shaped the CDI files"),
        (NVIDIA, "flags.plugin.nvidiaCTKPath", "/x", "set where hooks' program is"),
        (NVIDIA, "flags.plugin.nvidiaCDIHookPath", "/x", "set where hooks' program is"),
        (NVIDIA, "flags.plugin.containerDriverRoot", "/x", "set where the driver is"),
        (NVIDIA, "flags.plugin.sharedDevicesAllocationPolicy", "packed", HONOURED),
        (NVIDIA, "resources", {"gpus": [{"pattern": "A*", "name": "x"}]}, DROPPED),
        (NVIDIA, "resources", {"mig": [{"pattern": "*", "name": "x"}]}, DROPPED),
        (NVIDIA, "sharing.timeSlicing.renameByDefault", True, HONOURED),
        (NVIDIA, "sharing.timeSlicing.failRequestsGreaterThanOne", True, HONOURED),
        (NVIDIA, "sharing.timeSlicing.resources[0].name", "x", HONOURED),
        (NVIDIA, "sharing.timeSlicing.resources[0].replicas", 5, HONOURED),
        (NVIDIA, "sharing.timeSlicing.resources[0].rename", "x", DROPPED),
        (NVIDIA, "sharing.timeSlicing.resources[0].devices", [0], DROPPED),
        (MPS, "sharing.mps.renameByDefault", True, HONOURED),
        (MPS, "sharing.mps.failRequestsGreaterThanOne", True, "under MPS a container may hold"),
        (MPS, "sharing.mps.resources[0].name", "x", HONOURED),
        (MPS, "sharing.mps.resources[0].replicas", 5, HONOURED),
        (MPS, "sharing.mps.resources[0].rename", "x", DROPPED),
        (MPS, "sharing.mps.resources[0].devices", [0], DROPPED),
        (NVIDIA, "imex.channelIDs", [0], "given containers IMEX channels"),
        (NVIDIA, "imex.required", True, "refused containers without IMEX channels"),
    ],
    mig_parted: [
        (LAYOUT, "version", "v2", HONOURED),
        (LAYOUT, "mig-configs.a[0].devices", [1], HONOURED),
        (LAYOUT, "mig-configs.a[0].device-filter", "0x20B010DE", HONOURED),
        (EMPTY, "mig-configs.a[0].mig-enabled", False, HONOURED),
        (LAYOUT, "mig-configs.a[0].mig-devices", {"2g.10gb": 1}, HONOURED),
    ],
    hami: [
        (HAMI, "nvidia.resourceCountName", "a.b/c", HONOURED),
        (HAMI, "nvidia.resourceMemoryName", "a.b/c", "let a pod request a size in addition"),
        (
            HAMI,
            "nvidia.resourceMemoryPercentageName",
            "a.b/c",
            "let a pod request a size in addition",
        ),
        (HAMI, "nvidia.resourceCoreName", "a.b/c", "let a pod request a size in addition"),
        (HAMI, "nvidia.resourcePriorityName", "a.b/c", "let a pod stop others' kernels"),
        (HAMI, "nvidia.defaultMemory", 1000, HONOURED),
        (HAMI, "nvidia.defaultCores", 10, "limited a pod's use of SMs"),
        (HAMI, "nvidia.defaultGPUNum", 2, "added a vGPU to pods that name a size alone"),
        (HAMI, "nvidia.deviceSplitCount", 4, HONOURED),
        (HAMI, "nvidia.deviceMemoryScaling", 2, "given out more than a GPU has"),
        (HAMI, "nvidia.deviceCoreScaling", 2, "given out more than a GPU has"),
        (HAMI, "nvidia.memoryFactor", 10, "counted memory in larger units"),
        (HAMI, "nvidia.preConfiguredDeviceMemory", 9, "set the memory of GPUs that do not say"),
        (HAMI, "nvidia.overwriteEnv", True, "hidden all GPUs from pods that ask for none"),
        (HAMI, "nvidia.gpuCorePolicy", "force", "limited a pod's use of SMs"),
        (HAMI, "nvidia.disableCoreLimit", True, SO_ANYWAY),
        (HAMI, "nvidia.enableNumaTopology", False, "hidden NUMA nodes"),
        (HAMI, "nvidia.libCudaLogLevel", 3, "set how much HAMi's library logs"),
        (HAMI, "nvidia.runtimeClassName", "nvidia", "given pods a runtime class"),
        (CUT, "nvidia.migProfileAllowlist", [{"models": ["B"], "profiles": ["a"]}], HONOURED),
        (CUT, "nvidia.knownMigGeometries", GEOMETRY, "has no effect: migProfileAllowlist is given"),
        (KNOWN, "nvidia.knownMigGeometries", OTHER_GEOMETRY, HONOURED),
        (OWN, "nodeconfig[0].name", "other", HONOURED),
        (HAMI, "nodeconfig[0].operatingmode", "mps", HONOURED),
        (HAMI, "nodeconfig[0].devicesplitcount", 4, HONOURED),
        (HAMI, "nodeconfig[0].filterdevices", {"index": [1]}, HONOURED),
        (HAMI, "nodeconfig[0].devicememoryscaling", 2, "given out more than a GPU has"),
        (HAMI, "nodeconfig[0].devicecorescaling", 2, "given out more than a GPU has"),
        (HAMI, "nodeconfig[0].preconfigureddevicememory", 9, "set the memory of GPUs"),
        (HAMI, "nodeconfig[0].enablenumatopology", False, "hidden NUMA nodes"),
        (HAMI, "nodeconfig[0].enablegetpreferredallocation", False, "left the choice of GPUs"),
        (HAMI, "nodeconfig[0].migstrategy", "single", "named MIG instances"),
    ],
}
"""By format, each key that its own source names: what stands in the file beside it, the key, a
value that asks for something, and what becomes of it: it is HONOURED, SO_ANYWAY, or a note says so.
"""
_ANY_MAPPING: Final = {"nodeconfig[0].filterdevices"}
"""Those that take a mapping of whatever keys, and tell of unknown ones."""
ROWS: Final = [row for rows in KEYS.values() for row in rows]


def with_key(base: Base, path: str, value: object) -> str:
    """Write a file with one more key, at a path such as `a.b[0].c`."""
    whole = copy.deepcopy(dict(base))
    *parents, last = path.replace("[0]", ".0").split(".")
    at: Any = whole
    for parent in parents:
        at = at[int(parent)] if parent.isdecimal() else at.setdefault(parent, {})
    at[last] = value
    return yaml.safe_dump(whole)


def outcome(text: str) -> ConvertedConfig | str:
    """Convert a file and the layout in it, if there is one; or return the refusal."""
    whole = yaml.safe_load(text)
    plugin = {key: value for key, value in whole.items() if key != "mig-configs"}
    texts = [text]
    if "mig-configs" in whole and "sharing" in whole:
        texts = [yaml.safe_dump(plugin), yaml.safe_dump(LAYOUT)]
    try:
        return converted(*texts, node="n")
    except ConfigError as error:
        return str(error)


def data_of(found: ConvertedConfig | str) -> object:
    """Return the converted file in any form."""
    return found if isinstance(found, str) else found.data


@pytest.mark.parametrize(("base", "key", "value", "said"), ROWS, ids=lambda value: str(value)[:60])
def test_a_key_is_honoured_or_named(base: Base, key: str, value: object, said: str) -> None:
    """A key that asks for something changes the result, or has one note on its lost effect."""
    before, found = outcome(yaml.safe_dump(dict(base))), outcome(with_key(base, key, value))
    if isinstance(found, str):
        assert said == HONOURED
        assert found.startswith("f.yaml: ")
        return

    texts = [note.text for note in found.notes if note.path.removesuffix("[0]") == key]
    if said in (HONOURED, SO_ANYWAY):
        assert (data_of(found) != data_of(before)) is (said == HONOURED)
        assert not [text for text in texts if text.startswith(("unknown", "has no effect here"))]
    else:
        [text] = texts
        assert said in text
        assert data_of(found) == data_of(before)


@pytest.mark.parametrize(
    ("base", "key"),
    [(base, key) for base, key, _, said in ROWS if said == HONOURED and key not in _ANY_MAPPING],
    ids=lambda value: str(value)[:60],
)
def test_a_value_of_the_wrong_kind_is_refused_with_its_line(base: Base, key: str) -> None:
    """A value of another type is refused with file, line and path."""
    result = outcome(with_key(base, key, {"a": "b"}))
    assert isinstance(result, str)

    place, problem = re.fullmatch(r"[fg]\.yaml: \d+: ([^:]+): (.*)", result).groups()  # type: ignore[union-attr] # then the test fails
    assert place.replace('["a"]', "").startswith(key)
    assert re.fullmatch(r"expected .+, got .+|'.*' is unknown; .*|missing key `.+`", problem)


@pytest.mark.parametrize("form", list(KEYS), ids=lambda form: form.__name__)
def test_no_key_is_left_out_above(form: ModuleType) -> None:
    """Every key that a format reads, or has a sentence for, stands in the table."""
    listed = {
        key.replace("[0]", "").replace("mig-configs.a", "mig-configs")
        for *_, key, _, _ in KEYS[form]
    }
    known = set(leaves(msgspec.inspect.type_info(FILE_STRUCTS[form])))
    known |= set(getattr(form, "IGNORED_KEYS", {}))

    missing = {
        key
        for key in (name.replace("nvidia.nodeconfig", "nodeconfig") for name in known)
        if not any(key == each or key.startswith(f"{each}.") for each in listed)
    }
    assert missing == set()


def leaves(info: msgspec.inspect.Type, path: str = "") -> Iterator[str]:
    """Return the paths of all keys of this type."""
    if isinstance(info, msgspec.inspect.StructType):
        for field in info.fields:
            yield from leaves(field.type, f"{path}.{field.encode_name}".removeprefix("."))
    elif isinstance(info, msgspec.inspect.UnionType):
        for member in info.types:
            yield from leaves(member, path)
    elif isinstance(info, msgspec.inspect.DictType):
        yield from leaves(info.value_type, path)
    elif (item := getattr(info, "item_type", None)) is not None:
        yield from leaves(item, path)
    elif path and not isinstance(info, msgspec.inspect.NoneType):
        yield path


VARIABLES: Final = [
    ("MIG_STRATEGY", "single", HONOURED),
    ("FAIL_ON_INIT_ERROR", "false", "decided whether to end without NVML"),
    ("PASS_DEVICE_SPECS", "false", HONOURED),
    ("DEVICE_LIST_STRATEGY", "cdi-cri", HONOURED),
    ("DEVICE_ID_STRATEGY", "index", "named GPUs by index"),
    ("GDRCOPY_ENABLED", "true", "given containers GDRCopy's devices"),
    ("GDS_ENABLED", "true", "given containers GPUDirect Storage's devices"),
    ("MOFED_ENABLED", "true", "given containers Mellanox' devices"),
    ("KUBELET_SOCKET", "/x.sock", "set where the kubelet listens"),
    ("CDI_ANNOTATION_PREFIX", "a.b/", "shaped the CDI files"),
    ("MPS_ROOT", "/x", "set where NVIDIA's MPS daemon is"),
    ("SHARED_DEVICES_ALLOCATION_POLICY", "packed", HONOURED),
    ("DEVICE_DISCOVERY_STRATEGY", "tegra", "looked for GPUs in another way"),
    ("IMEX_CHANNEL_IDS", "0", "given containers IMEX channels"),
    ("IMEX_REQUIRED", "true", "refused containers without IMEX channels"),
    ("CDI_FEATURE_FLAGS", "x", "shaped the CDI files"),
    ("CDI_DISABLE_HOOKS", "all", "shaped the CDI files"),
    ("DP_DISABLE_HEALTHCHECKS", "94", HONOURED),
    ("DP_ENABLE_HEALTHCHECKS", "13", HONOURED),
    ("NODE_LABEL", "a.b/c", "named the label that chooses this node's profile"),
    ("CONFIG_FILE_DST", "/x", "set where config-manager links the chosen file"),
    ("FALLBACK_STRATEGIES", "empty", "set the profile of nodes without a label"),
    ("ONESHOT", "true", "chosen a profile once"),
    ("SEND_SIGNAL", "false", "signalled the plugin"),
    ("SIGNAL", "2", "signalled the plugin"),
    ("PROCESS_TO_SIGNAL", "x", "signalled the plugin"),
    ("MIG_PARTED_HOOKS_FILE", "/x", "named programs that run around a change"),
    ("MIG_PARTED_MODE_CHANGE_ONLY", "true", "left the instances as they are"),
    ("GPU_CLIENTS_FILE", "/x", "stopped programs of the host"),
    ("WITH_SHUTDOWN_HOST_GPU_CLIENTS", "true", "stopped programs of the host"),
    ("WITH_REBOOT", "true", "rebooted the node"),
]
"""Those of NVIDIA's daemon sets that the conversion reads, or names."""
OPTIONS: Final = (
    *("CONFIG_FILE", "CONFIG_FILE_SRCDIR", "MIG_PARTED_CONFIG_FILE", "DEFAULT_CONFIG"),
    *("MIG_PARTED_SELECTED_CONFIG", "NODE_NAME", "NVIDIA_DRIVER_ROOT", "NVIDIA_DEV_ROOT"),
    *("CONTAINER_DRIVER_ROOT", "DRIVER_ROOT_CTR_PATH", "DEV_ROOT_CTR_PATH"),
    *("NVIDIA_CDI_HOOK_PATH", "NVIDIA_CTK_PATH"),
)
"""NVIDIA's variables that are options of ours."""
PAGE: Final = Path(__file__).parents[2] / "docs" / "development" / "compat.md"
TITLES: Final = {
    cnvrg: "MetaGPU",
    nvidia_file: "NVIDIA's device plugin",
    mig_parted: "mig-parted",
    hami: "HAMi",
}


def fates() -> Iterator[tuple[str, str, str]]:
    """Yield each project's keys and variables, and what becomes of each."""
    for form, rows in KEYS.items():
        listed = {
            key.replace("[0]", "[]").replace("mig-configs.a", "mig-configs.NAME"): said
            for _, key, _, said in rows
        }
        for key, said in sorted(listed.items()):
            yield TITLES[form], key, fate(said)
    for variable, _, said in VARIABLES:
        yield "variables of NVIDIA", variable, fate(said)
    for variable in OPTIONS:
        yield "variables of NVIDIA", variable, "honoured"
    for variable in variables.CNVRG_VARIABLES:
        yield "variables of MetaGPU", variable, "honoured"
    yield "variables of MetaGPU", f"other {variables.CNVRG_PREFIX}…", "warned"


def fate(said: str) -> str:
    """Return the word of the page for an outcome."""
    return {HONOURED: "honoured", SO_ANYWAY: "as here anyway"}.get(said, "warned")


def test_the_page_lists_what_becomes_of_every_key() -> None:
    """The page of cases has each key and variable of each project, by its effect in the tests."""
    text = PAGE.read_text(encoding="utf-8").partition("## Every key and variable")[2]
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \| (`.*`) \|$", text, re.MULTILINE)
    page = {
        (name, key, what) for name, what, keys in rows for key in re.findall(r"`([^`]+)`", keys)
    }
    wanted = set(fates())

    assert page == wanted


def test_every_variable_that_is_read_is_listed_above() -> None:
    """No variable of NVIDIA that the conversion knows is left out of the table."""
    known = {
        *variables.NVIDIA_VARIABLES,
        *variables.VARIABLES_OF_FLAGS,
        *variables.IGNORED_VARIABLES,
    }
    assert known == {variable for variable, _, _ in VARIABLES}


@pytest.mark.parametrize(("variable", "value", "said"), VARIABLES)
def test_a_variable_is_honoured_or_named(variable: str, value: str, said: str) -> None:
    """A variable that asks for something has its effect, or one note on its lost effect."""
    text = yaml.safe_dump(dict(NVIDIA))
    found = converted(text, environment={variable: value})
    texts = [note.text for note in found.notes if note.path == variable]

    if said == HONOURED:
        assert found.data != converted(text).data
        assert texts == []
    else:
        [only] = texts
        assert said in only
        assert found.data == converted(text).data
