"""NVIDIA's device plugin's file, `version: v1`.

Keys and defaults are those of k8s-device-plugin 0.20, read in its source.
"""

from typing import Final, Literal

import msgspec

from metagpu.compat.backend_options import Strategy
from metagpu.compat.keys import IgnoredKey
from metagpu.core.config.document import Document
from metagpu.core.config.errors import ConfigReason

_GFD: Final = "shaped GPU Feature Discovery's labels; metagpu has its own, see --cluster"
_ROOT: Final = "set where the driver is; metagpu looks for it, and takes {} as well"
_HOOK: Final = "set where hooks' program is; metagpu looks for it, or see --nvidia-cdi-hook-path"
CDI_FILES: Final = (
    "shaped the CDI files that the plugin writes; metagpu writes its own, metagpu.io/gpu"
)

IGNORED_KEYS: Final = {
    "flags.failOnInitError": IgnoredKey(
        "decided whether to end without NVML; metagpu tries again every 5 s", (True,)
    ),
    "flags.mpsRoot": IgnoredKey("set where NVIDIA's MPS daemon is; metagpu starts its own"),
    "flags.nvidiaDriverRoot": IgnoredKey(
        _ROOT.format("--driver-root"), ("/", "/run/nvidia/driver")
    ),
    "flags.nvidiaDevRoot": IgnoredKey(_ROOT.format("--dev-root"), ("/",)),
    "flags.gdrcopyEnabled": IgnoredKey("given containers GDRCopy's devices", (False,)),
    "flags.gdsEnabled": IgnoredKey("given containers GPUDirect Storage's devices", (False,)),
    "flags.mofedEnabled": IgnoredKey("given containers Mellanox' devices", (False,)),
    "flags.useNodeFeatureAPI": IgnoredKey(
        "published labels as a NodeFeature, or not; metagpu does where it is allowed, see --cluster"
    ),
    "flags.deviceDiscoveryStrategy": IgnoredKey(
        "looked for GPUs in another way; metagpu asks NVML", ("auto", "nvml")
    ),
    "flags.gfd": IgnoredKey(_GFD),
    "flags.plugin.deviceIDStrategy": IgnoredKey(
        "named GPUs by index to the container runtime; metagpu names them by uuid", ("uuid",)
    ),
    "flags.plugin.cdiAnnotationPrefix": IgnoredKey(CDI_FILES, ("cdi.k8s.io/",)),
    "flags.plugin.nvidiaCTKPath": IgnoredKey(_HOOK, ("/usr/bin/nvidia-ctk",)),
    "flags.plugin.nvidiaCDIHookPath": IgnoredKey(_HOOK, ("/usr/bin/nvidia-ctk",)),
    "flags.plugin.containerDriverRoot": IgnoredKey(
        _ROOT.format("--container-driver-root"), ("/driver-root",)
    ),
    "imex.channelIDs": IgnoredKey("given containers IMEX channels"),
    "imex.required": IgnoredKey("refused containers without IMEX channels", (False,)),
}

Devices = str | int | tuple[str | int, ...]


class NvidiaPluginFlags(msgspec.Struct, rename="camel"):
    """`flags.plugin`."""

    pass_device_specs: bool | None = None
    device_list_strategy: str | tuple[str, ...] | None = None
    shared_devices_allocation_policy: Literal["distributed", "packed"] | None = None


class NvidiaFlags(msgspec.Struct, rename="camel"):
    """`flags`."""

    mig_strategy: Strategy | None = None
    plugin: NvidiaPluginFlags | None = None


class PatternName(msgspec.Struct):
    """One entry of `resources`: GPUs or MIG profiles that match, and their name."""

    pattern: str
    name: str


class NvidiaResources(msgspec.Struct):
    """`resources`: NVIDIA's plugin reads and drops it."""

    gpus: tuple[PatternName, ...] | None = None
    mig: tuple[PatternName, ...] | None = None

    @property
    def is_given(self) -> bool:
        """True if there is any name."""
        return bool(self.gpus or self.mig)


class ReplicatedResource(msgspec.Struct):
    """One shared resource; NVIDIA's plugin drops `rename` and `devices`."""

    name: str
    replicas: int
    rename: str = ""
    devices: Devices = "all"


class NvidiaReplication(msgspec.Struct, rename="camel"):
    """`sharing.timeSlicing` or `sharing.mps`."""

    resources: tuple[ReplicatedResource, ...]
    rename_by_default: bool | None = None
    fail_requests_greater_than_one: bool | None = None


class NvidiaSharing(msgspec.Struct, rename="camel"):
    """`sharing`."""

    time_slicing: NvidiaReplication | None = None
    mps: NvidiaReplication | None = None


class NvidiaImex(msgspec.Struct):
    """`imex`: none of its keys is honoured."""


class NvidiaFile(msgspec.Struct):
    """The honoured keys of the file."""

    version: str | None = None
    flags: NvidiaFlags | None = None
    resources: NvidiaResources | None = None
    sharing: NvidiaSharing | None = None
    imex: NvidiaImex | None = None


def read(document: Document) -> NvidiaFile:
    """Read the file.

    Raises:
        ConfigError: the file breaks the rules of NVIDIA's plugin.
    """
    file = document.decode(NvidiaFile)
    if file.version not in (None, "", "v1"):
        problem = f"{file.version!r} is unknown; allowed: v1"
        raise document.error("version", problem, ConfigReason.UNKNOWN_VALUE)
    return file
