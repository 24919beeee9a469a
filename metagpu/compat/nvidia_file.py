"""The file of NVIDIA's device plugin, `version: v1`: its keys, and its environment variables.

Keys, variables and defaults are those of k8s-device-plugin 0.20, read in its source. A variable
wins over the file, as there.
"""

from collections.abc import Iterator, Mapping
from typing import Final, Literal

import msgspec

from metagpu.compat.contract import Note
from metagpu.compat.cuts import Strategy
from metagpu.compat.keys import Unheeded, noted
from metagpu.core.document import Document
from metagpu.core.errors import ConfigError

_GFD: Final = "shaped GPU Feature Discovery's labels; metagpu has its own, see --cluster"
_ROOT: Final = "said where the driver's files are; use --dev-root"
_CDI: Final = "shaped the CDI files that the plugin writes; metagpu writes its own, metagpu.io/gpu"

_UNHEEDED: Final = {
    "flags.failOnInitError": Unheeded(
        "decided whether to end without NVML; metagpu tries again every 5 s", (True,)
    ),
    "flags.mpsRoot": Unheeded("said where NVIDIA's MPS daemon is; metagpu keeps its own"),
    "flags.nvidiaDriverRoot": Unheeded(_ROOT, ("/", "/run/nvidia/driver")),
    "flags.nvidiaDevRoot": Unheeded(_ROOT, ("/",)),
    "flags.gdrcopyEnabled": Unheeded("given containers GDRCopy's devices", (False,)),
    "flags.gdsEnabled": Unheeded("given containers GPUDirect Storage's devices", (False,)),
    "flags.mofedEnabled": Unheeded("given containers Mellanox' devices", (False,)),
    "flags.useNodeFeatureAPI": Unheeded(
        "published labels as a NodeFeature, or not; metagpu does where it may, see --cluster"
    ),
    "flags.deviceDiscoveryStrategy": Unheeded(
        "looked for GPUs in another way; metagpu asks NVML", ("auto", "nvml")
    ),
    "flags.gfd": Unheeded(_GFD),
    "flags.plugin.deviceIDStrategy": Unheeded(
        "named GPUs by index to the container runtime; metagpu names them by uuid", ("uuid",)
    ),
    "flags.plugin.cdiAnnotationPrefix": Unheeded(_CDI, ("cdi.k8s.io/",)),
    "flags.plugin.nvidiaCTKPath": Unheeded(_CDI, ("/usr/bin/nvidia-ctk",)),
    "flags.plugin.nvidiaCDIHookPath": Unheeded(_CDI, ("/usr/bin/nvidia-ctk",)),
    "flags.plugin.containerDriverRoot": Unheeded(_ROOT, ("/driver-root",)),
    "imex.channelIDs": Unheeded("given containers IMEX channels"),
    "imex.required": Unheeded("refused containers without IMEX channels", (False,)),
}

_VARIABLES: Final = {
    "FAIL_ON_INIT_ERROR": "flags.failOnInitError",
    "NVIDIA_DRIVER_ROOT": "flags.nvidiaDriverRoot",
    "NVIDIA_DEV_ROOT": "flags.nvidiaDevRoot",
    "GDRCOPY_ENABLED": "flags.gdrcopyEnabled",
    "GDS_ENABLED": "flags.gdsEnabled",
    "MOFED_ENABLED": "flags.mofedEnabled",
    "DEVICE_DISCOVERY_STRATEGY": "flags.deviceDiscoveryStrategy",
    "DEVICE_ID_STRATEGY": "flags.plugin.deviceIDStrategy",
    "CDI_ANNOTATION_PREFIX": "flags.plugin.cdiAnnotationPrefix",
    "NVIDIA_CTK_PATH": "flags.plugin.nvidiaCTKPath",
    "NVIDIA_CDI_HOOK_PATH": "flags.plugin.nvidiaCDIHookPath",
    "CONTAINER_DRIVER_ROOT": "flags.plugin.containerDriverRoot",
    "DRIVER_ROOT_CTR_PATH": "flags.plugin.containerDriverRoot",
    "MPS_ROOT": "flags.mpsRoot",
    "IMEX_CHANNEL_IDS": "imex.channelIDs",
    "IMEX_REQUIRED": "imex.required",
}
"""Variables of flags that are not honoured; those that are stand in `settings`."""

_VARIABLES_ALONE: Final = {
    "KUBELET_SOCKET": Unheeded(
        "said where the kubelet listens; use --kubelet-dir",
        ("/var/lib/kubelet/device-plugins/kubelet.sock",),
    ),
    "CDI_FEATURE_FLAGS": Unheeded(_CDI),
    "CDI_DISABLE_HOOKS": Unheeded(_CDI),
}
"""Variables of flags that no file can say."""

_TRUTH: Final = {"true": True, "1": True, "t": True, "false": False, "0": False, "f": False}
_STRATEGIES: Final = ("none", "single", "mixed")
_POLICIES: Final = ("distributed", "packed")

Devices = str | int | tuple[str | int, ...]


class Plugin(msgspec.Struct, rename="camel"):
    """`flags.plugin`."""

    pass_device_specs: bool | None = None
    device_list_strategy: str | tuple[str, ...] | None = None
    shared_devices_allocation_policy: Literal["distributed", "packed"] | None = None


class Flags(msgspec.Struct, rename="camel"):
    """`flags`."""

    mig_strategy: Strategy | None = None
    plugin: Plugin | None = None


class Named(msgspec.Struct):
    """One entry of `resources`: GPUs or MIG profiles that match, and their name."""

    pattern: str
    name: str


class Resources(msgspec.Struct):
    """`resources`; NVIDIA's plugin reads and strips it, here it works."""

    gpus: tuple[Named, ...] = ()
    mig: tuple[Named, ...] = ()


class Replicated(msgspec.Struct):
    """One resource that is shared; NVIDIA's plugin strips `rename` and `devices`, we do not."""

    name: str
    replicas: int
    rename: str = ""
    devices: Devices = "all"


class Replication(msgspec.Struct, rename="camel"):
    """`sharing.timeSlicing` or `sharing.mps`."""

    resources: tuple[Replicated, ...]
    rename_by_default: bool = False
    fail_requests_greater_than_one: bool | None = None


class Sharing(msgspec.Struct, rename="camel"):
    """`sharing`."""

    time_slicing: Replication | None = None
    mps: Replication | None = None


class Imex(msgspec.Struct):
    """`imex`: nothing of it is honoured."""


class File(msgspec.Struct):
    """What of the file is honoured."""

    version: str = "v1"
    flags: Flags | None = None
    resources: Resources | None = None
    sharing: Sharing | None = None
    imex: Imex | None = None


class Settings(msgspec.Struct, frozen=True):
    """The flags that are honoured, from the file and the environment."""

    strategy: Strategy | None = None
    pass_device_specs: bool | None = None
    device_lists: tuple[str, ...] = ()
    policy: str | None = None
    xids: Mapping[int, str] = {}


def read(document: Document) -> File:
    """Read the file.

    Raises:
        ConfigError: if it is not as NVIDIA's plugin wants it.
    """
    file = document.decode(File)
    if file.version not in ("", "v1"):
        raise document.error("version", f"{file.version!r} is not known here; allowed: v1")
    return file


def settings(flags: Flags | None, environment: Mapping[str, str]) -> Settings:
    """Give the flags that are honoured; the environment wins.

    Raises:
        ConfigError: if a variable says what cannot be.
    """
    flags = flags or Flags()
    plugin = flags.plugin or Plugin()
    lists = environment.get("DEVICE_LIST_STRATEGY") or plugin.device_list_strategy or ()
    listed = lists.split(",") if isinstance(lists, str) else lists
    passing = environment.get("PASS_DEVICE_SPECS")

    return msgspec.convert(
        {
            "strategy": _one_of("MIG_STRATEGY", _STRATEGIES, environment) or flags.mig_strategy,
            "pass_device_specs": _truth("PASS_DEVICE_SPECS", passing)
            if passing
            else plugin.pass_device_specs,
            "device_lists": tuple(each.strip() for each in listed),
            "policy": _one_of("SHARED_DEVICES_ALLOCATION_POLICY", _POLICIES, environment)
            or plugin.shared_devices_allocation_policy,
            "xids": {
                **_xids("DP_DISABLE_HEALTHCHECKS", environment, "application"),
                **_xids("DP_ENABLE_HEALTHCHECKS", environment, "fatal"),
            },
        },
        Settings,
    )


def notes(document: Document | None, environment: Mapping[str, str]) -> Iterator[Note]:
    """Find what is not honoured, in the file and in the environment."""
    if document is not None:
        yield from noted(document, File, _UNHEEDED)

    flags = {variable: _UNHEEDED[path] for variable, path in _VARIABLES.items()}
    for variable, unheeded in {**flags, **_VARIABLES_ALONE}.items():
        value: object = environment.get(variable)
        value = _TRUTH.get(str(value).lower(), value)
        if unheeded.asks(value):
            yield Note("environment", 0, variable, unheeded.text)

    for variable in ("DP_DISABLE_HEALTHCHECKS", "DP_ENABLE_HEALTHCHECKS"):
        if {"all", "xids"} & set(environment.get(variable, "").lower().split(",")):
            text = "has no effect on all XIDs at once; name those that differ"
            yield Note("environment", 0, variable, text)


def _one_of(variable: str, allowed: tuple[str, ...], environment: Mapping[str, str]) -> str | None:
    value = environment.get(variable)
    if value and value not in allowed:
        problem = f"{value!r} is not known here; allowed: {', '.join(sorted(allowed))}"
        raise ConfigError(problem, file="environment", path=variable)
    return value or None


def _truth(variable: str, value: str) -> bool:
    if (truth := _TRUTH.get(value.lower())) is None:
        problem = f"{value!r} is neither true nor false"
        raise ConfigError(problem, file="environment", path=variable)
    return truth


def _xids(variable: str, environment: Mapping[str, str], severity: str) -> dict[int, str]:
    """Read a list of XIDs; NVIDIA's plugin passes over what is no number, and so do we."""
    listed = environment.get(variable, "").split(",")
    return {int(part): severity for part in map(str.strip, listed) if part.isdecimal()}
