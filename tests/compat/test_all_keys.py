"""Every key of every format: it is honoured, or one note says what it would have done."""

import copy
import re
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any, Final

import msgspec
import pytest
import yaml

from metagpu.compat import cnvrg, hami, mig_parted, nvidia_file
from metagpu.compat.contract import Converted
from metagpu.core.errors import ConfigError
from tests.build import gpu
from tests.compat.rig import converted

HONOURED: Final = ""
SO_ANYWAY: Final = "."
GEOMETRY: Final = [{"models": ["A"], "allowedGeometries": [[{"name": "1g.5gb", "count": 7}]]}]
ALLOWED: Final = [{"models": ["A"], "profiles": ["1g.5gb"]}]
LAYOUT: Final[dict[str, Any]] = {
    "mig-configs": {"a": [{"mig-enabled": True, "mig-devices": {"1g.5gb": 7}}]}
}

Base = Mapping[str, Any]

CNVRG: Final[Base] = {
    "deviceSharing": [{"resourceName": "a.b/c", "uuid": ["*"], "metagpusPerGpu": 8}]
}
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

KEYS: Final[Mapping[ModuleType, list[tuple[Base, str, Any, str]]]] = {
    cnvrg: [
        (CNVRG, "accelerator", "amd", HONOURED),
        (CNVRG, "processesDiscoveryPeriod", 5, "had none in MetaGPU either"),
        (CNVRG, "deviceCacheTTL", 3600, "set how often GPUs are read"),
        (CNVRG, "jwtSecret", "x", "signed tokens"),
        (CNVRG, "deviceToken", "x", "named a token of the operator's"),
        (CNVRG, "containerToken", "x", "given a token to containers"),
        (CNVRG, "mgctlTar", "/opt/mgctl", "named the program that is copied into containers"),
        (CNVRG, "mgctlAutoInject", True, HONOURED),
        (CNVRG, "serverAddr", "0.0.0.0:50052", "served MetaGPU's API on TCP"),
        (CNVRG, "memoryEnforcer", True, HONOURED),
        (CNVRG, "nodename", "n", "told pods of this node from others"),
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
        (NVIDIA, "flags.migStrategy", "mixed", "offered the MIG instances that there are"),
        ({**NVIDIA, **LAYOUT}, "flags.migStrategy", "single", HONOURED),
        (NVIDIA, "flags.failOnInitError", False, "decided whether to end without NVML"),
        (NVIDIA, "flags.mpsRoot", "/mps", "said where NVIDIA's MPS daemon is"),
        (NVIDIA, "flags.nvidiaDriverRoot", "/d", "said where the driver's files are"),
        (NVIDIA, "flags.nvidiaDevRoot", "/d", "said where the driver's files are"),
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
        (NVIDIA, "flags.plugin.nvidiaCTKPath", "/x", "shaped the CDI files"),
        (NVIDIA, "flags.plugin.nvidiaCDIHookPath", "/x", "shaped the CDI files"),
        (NVIDIA, "flags.plugin.containerDriverRoot", "/x", "said where the driver's files are"),
        (NVIDIA, "flags.plugin.sharedDevicesAllocationPolicy", "packed", HONOURED),
        (NVIDIA, "resources.gpus", [{"pattern": "A*", "name": "x"}], HONOURED),
        (NVIDIA, "resources.mig", [{"pattern": "*", "name": "x"}], "renamed MIG instances"),
        ({**NVIDIA, **LAYOUT}, "resources.mig", [{"pattern": "*", "name": "x"}], HONOURED),
        (NVIDIA, "sharing.timeSlicing.renameByDefault", True, HONOURED),
        (NVIDIA, "sharing.timeSlicing.failRequestsGreaterThanOne", True, HONOURED),
        (NVIDIA, "sharing.timeSlicing.resources[0].name", "x", HONOURED),
        (NVIDIA, "sharing.timeSlicing.resources[0].replicas", 5, HONOURED),
        (NVIDIA, "sharing.timeSlicing.resources[0].rename", "x", HONOURED),
        (NVIDIA, "sharing.timeSlicing.resources[0].devices", [0], HONOURED),
        (MPS, "sharing.mps.renameByDefault", True, HONOURED),
        (MPS, "sharing.mps.failRequestsGreaterThanOne", True, "under MPS a container may hold"),
        (MPS, "sharing.mps.resources[0].name", "x", HONOURED),
        (MPS, "sharing.mps.resources[0].replicas", 5, HONOURED),
        (MPS, "sharing.mps.resources[0].rename", "x", HONOURED),
        (MPS, "sharing.mps.resources[0].devices", [0], HONOURED),
        (NVIDIA, "imex.channelIDs", [0], "given containers IMEX channels"),
        (NVIDIA, "imex.required", True, "refused containers without IMEX channels"),
    ],
    mig_parted: [
        (LAYOUT, "version", "v2", HONOURED),
        (LAYOUT, "mig-configs.a[0].devices", [1], HONOURED),
        (LAYOUT, "mig-configs.a[0].device-filter", "0x20B010DE", HONOURED),
        (LAYOUT, "mig-configs.a[0].mig-enabled", False, HONOURED),
        (LAYOUT, "mig-configs.a[0].mig-devices", {"2g.10gb": 1}, HONOURED),
    ],
    hami: [
        (HAMI, "nvidia.resourceCountName", "a.b/c", HONOURED),
        (HAMI, "nvidia.resourceMemoryName", "a.b/c", "let a pod ask for a size beside"),
        (HAMI, "nvidia.resourceMemoryPercentageName", "a.b/c", "let a pod ask for a size beside"),
        (HAMI, "nvidia.resourceCoreName", "a.b/c", "let a pod ask for a size beside"),
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
        (HAMI, "nvidia.enableNumaTopology", False, "left NUMA nodes untold"),
        (HAMI, "nvidia.libCudaLogLevel", 3, "set how much HAMi's library logs"),
        (HAMI, "nvidia.runtimeClassName", "nvidia", "given pods a runtime class"),
        (CUT, "nvidia.migProfileAllowlist", [{"models": ["B"], "profiles": ["a"]}], HONOURED),
        (CUT, "nvidia.knownMigGeometries", GEOMETRY, "has no effect: migProfileAllowlist is given"),
        (OWN, "nodeconfig[0].name", "other", HONOURED),
        (HAMI, "nodeconfig[0].operatingmode", "mps", HONOURED),
        (HAMI, "nodeconfig[0].devicesplitcount", 4, HONOURED),
        (HAMI, "nodeconfig[0].filterdevices", {"index": [1]}, HONOURED),
        (HAMI, "nodeconfig[0].devicememoryscaling", 2, "given out more than a GPU has"),
        (HAMI, "nodeconfig[0].devicecorescaling", 2, "given out more than a GPU has"),
        (HAMI, "nodeconfig[0].preconfigureddevicememory", 9, "set the memory of GPUs"),
        (HAMI, "nodeconfig[0].enablenumatopology", False, "left NUMA nodes untold"),
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


def outcome(text: str) -> Converted | str:
    """Convert a file and the layout in it, if there is one; or give the refusal."""
    whole = yaml.safe_load(text)
    plugin = {key: value for key, value in whole.items() if key != "mig-configs"}
    texts = [text]
    if "mig-configs" in whole and "sharing" in whole:
        texts = [yaml.safe_dump(plugin), yaml.safe_dump(LAYOUT)]
    try:
        return converted(*texts, node="n")
    except ConfigError as error:
        return str(error)


def data_of(found: Converted | str) -> object:
    """Give what a file becomes, in whatever way."""
    return found if isinstance(found, str) else found.data


@pytest.mark.parametrize(("base", "key", "value", "said"), ROWS, ids=lambda it: str(it)[:60])
def test_a_key_is_honoured_or_named(base: Base, key: str, value: object, said: str) -> None:
    """What asks for something changes what comes out, or one note says what it would have done."""
    before, found = outcome(yaml.safe_dump(dict(base))), outcome(with_key(base, key, value))
    if isinstance(found, str):
        assert said == HONOURED
        assert found.startswith("f.yaml: ")
        return

    told = [note.text for note in found.notes if note.path.removesuffix("[0]") == key]
    if said in (HONOURED, SO_ANYWAY):
        assert (data_of(found) != data_of(before)) is (said == HONOURED)
        assert not [text for text in told if text.startswith(("unknown", "has no effect here"))]
    else:
        [text] = told
        assert said in text
        assert data_of(found) == data_of(before)


@pytest.mark.parametrize(
    ("base", "key"),
    [(base, key) for base, key, _, said in ROWS if said == HONOURED and key not in _ANY_MAPPING],
    ids=lambda it: str(it)[:60],
)
def test_a_value_of_the_wrong_kind_is_told_of_its_line(base: Base, key: str) -> None:
    """Where a key that is honoured has a value of another kind, file, line and path are named."""
    told = outcome(with_key(base, key, {"a": "b"}))
    assert isinstance(told, str)

    place, problem = re.fullmatch(r"[fg]\.yaml: \d+: ([^:]+): (.*)", told).groups()  # type: ignore[union-attr] # then the test fails
    assert place.replace('["a"]', "").startswith(key)
    assert re.fullmatch(r"expected .+, got .+|'.*' is not known here; .*|missing key `.+`", problem)


@pytest.mark.parametrize("form", list(KEYS), ids=lambda form: form.__name__)
def test_no_key_is_left_out_above(form: ModuleType) -> None:
    """Every key that a format reads, or has a sentence for, stands in the table."""
    listed = {
        key.replace("[0]", "").replace("mig-configs.a", "mig-configs")
        for *_, key, _, _ in KEYS[form]
    }
    root = getattr(form, "File", None) or form._File
    known = set(leaves(msgspec.inspect.type_info(root))) | set(getattr(form, "_UNHEEDED", {}))

    missing = {
        key
        for key in (it.replace("nvidia.nodeconfig", "nodeconfig") for it in known)
        if not any(key == each or key.startswith(f"{each}.") for each in listed)
    }
    assert missing == set()


def leaves(info: msgspec.inspect.Type, path: str = "") -> Iterator[str]:
    """Give the paths of all keys that are read as this type."""
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
    ("MIG_STRATEGY", "single", "offered the MIG instances that there are"),
    ("FAIL_ON_INIT_ERROR", "false", "decided whether to end without NVML"),
    ("NVIDIA_DRIVER_ROOT", "/d", "said where the driver's files are"),
    ("NVIDIA_DEV_ROOT", "/d", "said where the driver's files are"),
    ("PASS_DEVICE_SPECS", "false", HONOURED),
    ("DEVICE_LIST_STRATEGY", "cdi-cri", HONOURED),
    ("DEVICE_ID_STRATEGY", "index", "named GPUs by index"),
    ("GDRCOPY_ENABLED", "true", "given containers GDRCopy's devices"),
    ("GDS_ENABLED", "true", "given containers GPUDirect Storage's devices"),
    ("MOFED_ENABLED", "true", "given containers Mellanox' devices"),
    ("KUBELET_SOCKET", "/x.sock", "said where the kubelet listens"),
    ("CDI_ANNOTATION_PREFIX", "a.b/", "shaped the CDI files"),
    ("NVIDIA_CDI_HOOK_PATH", "/x", "shaped the CDI files"),
    ("NVIDIA_CTK_PATH", "/x", "shaped the CDI files"),
    ("DRIVER_ROOT_CTR_PATH", "/x", "said where the driver's files are"),
    ("CONTAINER_DRIVER_ROOT", "/x", "said where the driver's files are"),
    ("MPS_ROOT", "/x", "said where NVIDIA's MPS daemon is"),
    ("SHARED_DEVICES_ALLOCATION_POLICY", "packed", HONOURED),
    ("DEVICE_DISCOVERY_STRATEGY", "tegra", "looked for GPUs in another way"),
    ("IMEX_CHANNEL_IDS", "0", "given containers IMEX channels"),
    ("IMEX_REQUIRED", "true", "refused containers without IMEX channels"),
    ("CDI_FEATURE_FLAGS", "x", "shaped the CDI files"),
    ("CDI_DISABLE_HOOKS", "all", "shaped the CDI files"),
    ("DP_DISABLE_HEALTHCHECKS", "94", HONOURED),
    ("DP_ENABLE_HEALTHCHECKS", "13", HONOURED),
]
"""Those of NVIDIA's daemon set, but `CONFIG_FILE`, which is where this file is."""


@pytest.mark.parametrize(("variable", "value", "said"), VARIABLES)
def test_a_variable_is_honoured_or_named(variable: str, value: str, said: str) -> None:
    """What a variable asks for is done, or one note says what it would have done."""
    text = yaml.safe_dump(dict(NVIDIA))
    found = converted(text, environment={variable: value})
    told = [note.text for note in found.notes if note.path == variable]

    if said == HONOURED:
        assert found.data != converted(text).data
        assert told == []
    else:
        [only] = told
        assert said in only
        assert found.data == converted(text).data
