"""HAMi's configuration: `device-config.yaml`, and the `config.json` of its device plugin.

Keys are those of HAMi 2.10 and, for `knownMigGeometries`, of 2.9 and older. HAMi's scheduler
divides GPUs by MiB and percents that pods ask for; the kubelet knows counts alone, so here a GPU is
divided by `deviceSplitCount` or into parts of `defaultMemory`.
"""

from collections.abc import Iterable, Sequence
from typing import Final, Literal

import msgspec

from metagpu.compat import cuts, selection
from metagpu.compat.contract import Circumstances, Converted, Data, Draft, Origin
from metagpu.compat.keys import Unheeded, noted
from metagpu.core.document import Document
from metagpu.core.errors import ConfigError

_SPLIT: Final = 10
"""HAMi's own number of pods on a GPU."""
_SECOND: Final = (
    "let a pod ask for a size beside the number of vGPUs; the kubelet counts one number of a "
    "resource, so ask for more shares"
)
_OVERSUBSCRIBED: Final = "given out more than a GPU has; metagpu gives out what is there"
_NUMA: Final = "left NUMA nodes untold; metagpu tells them where the machine does"

_UNHEEDED: Final = {
    "nvidia.resourceMemoryName": Unheeded(_SECOND),
    "nvidia.resourceMemoryPercentageName": Unheeded(_SECOND),
    "nvidia.resourceCoreName": Unheeded(_SECOND),
    "nvidia.resourcePriorityName": Unheeded("let a pod stop others' kernels; metagpu does not"),
    "nvidia.defaultCores": Unheeded("limited a pod's use of SMs; backend mps does that", (0,)),
    "nvidia.defaultGPUNum": Unheeded(
        "added a vGPU to pods that name a size alone; a pod names shares here", (1,)
    ),
    "nvidia.deviceMemoryScaling": Unheeded(_OVERSUBSCRIBED, (1,)),
    "nvidia.deviceCoreScaling": Unheeded(_OVERSUBSCRIBED, (1,)),
    "nvidia.memoryFactor": Unheeded("counted memory in larger units", (0, 1)),
    "nvidia.preConfiguredDeviceMemory": Unheeded("set the memory of GPUs that do not say", (0,)),
    "nvidia.overwriteEnv": Unheeded("hidden all GPUs from pods that ask for none", (False,)),
    "nvidia.gpuCorePolicy": Unheeded("limited a pod's use of SMs; backend mps does", ("disable",)),
    "nvidia.disableCoreLimit": Unheeded("let pods use all SMs, as here", (True, False)),
    "nvidia.enableNumaTopology": Unheeded(_NUMA, (True,)),
    "nvidia.libCudaLogLevel": Unheeded("set how much HAMi's library logs; metagpu has none"),
    "nvidia.runtimeClassName": Unheeded("given pods a runtime class; name it in the pod"),
    **{
        f"{place}nodeconfig.{key}": unheeded
        for place in ("", "nvidia.")
        for key, unheeded in {
            "devicememoryscaling": Unheeded(_OVERSUBSCRIBED, (1,)),
            "devicecorescaling": Unheeded(_OVERSUBSCRIBED, (1,)),
            "preconfigureddevicememory": Unheeded("set the memory of GPUs that do not say", (0,)),
            "enablenumatopology": Unheeded(_NUMA, (True,)),
            "enablegetpreferredallocation": Unheeded(
                "left the choice of GPUs to the kubelet; metagpu proposes one", (True,)
            ),
            "migstrategy": Unheeded(
                "named MIG instances; metagpu names them by profile", ("none", "mixed")
            ),
        }.items()
    },
}


class _Instance(msgspec.Struct):
    """A profile in one of HAMi's geometries; its size and number are NVML's to say."""

    name: str
    memory: int | None = None
    count: int | None = None
    core: int | None = None


class _Geometries(msgspec.Struct, rename="camel"):
    """The profiles of some models, up to HAMi 2.9."""

    models: tuple[str, ...]
    allowed_geometries: tuple[tuple[_Instance, ...], ...]

    @property
    def profiles(self) -> tuple[str, ...]:
        """Every profile that stands in a geometry."""
        return tuple(dict.fromkeys(i.name for group in self.allowed_geometries for i in group))


class _Allowed(msgspec.Struct):
    """The profiles of some models, from HAMi 2.10 on."""

    models: tuple[str, ...]
    profiles: tuple[str, ...]


class _Filter(msgspec.Struct):
    """GPUs that HAMi leaves alone."""

    uuid: tuple[str, ...] = ()
    index: tuple[int, ...] = ()


class _Node(msgspec.Struct):
    """What is so on one node."""

    name: str
    operatingmode: Literal["hami-core", "mig", "mps"] = "hami-core"
    devicesplitcount: int | None = None
    filterdevices: _Filter = msgspec.field(default_factory=_Filter)


class _Nvidia(msgspec.Struct, rename="camel"):
    """The section `nvidia`."""

    resource_count_name: str = "nvidia.com/gpu"
    device_split_count: int | None = None
    default_memory: int = 0
    known_mig_geometries: tuple[_Geometries, ...] = ()
    mig_profile_allowlist: tuple[_Allowed, ...] = ()
    nodeconfig: tuple[_Node, ...] = ()


class _File(msgspec.Struct):
    """What of either file is honoured."""

    nvidia: _Nvidia | None = None
    nodeconfig: tuple[_Node, ...] = ()


_ALIASES: Final = {"7g.79gb": "7g.80gb"}
"""What HAMi calls a profile of the A100 of 80 GB, and NVIDIA's name for it."""
_VENDORS: Final = (
    *("amd", "ascend", "awsneuron", "biren", "cambricon", "enflame", "hygon", "iluvatar"),
    *("kunlun", "kunlunxin", "metax", "mthreads", "vastai", "vnpus"),
)
"""Sections of other makers' devices."""


def nodes(document: Document) -> list[str]:
    """Name the nodes of which a file says something.

    Raises:
        ConfigError: if it is not as HAMi wants it.
    """
    file = document.decode(_File)
    inner = file.nvidia.nodeconfig if file.nvidia else ()
    return [node.name for node in (*file.nodeconfig, *inner)]


def convert(documents: Sequence[Document], circumstances: Circumstances) -> Converted:
    """Offer what HAMi would on this node, as far as counts can say it.

    Raises:
        ConfigError: if a file is wrong, or nodes differ and the node's name is not known.
    """
    draft = Draft()
    sections: list[tuple[Origin, _Nvidia]] = []
    told: list[tuple[Origin, _Node]] = []

    for document in documents:
        file = document.decode(_File)
        draft.notes += [
            note
            for note in noted(document, _File, _UNHEEDED)
            if note.path not in _VENDORS  # told once, below
        ]
        if others := [key for key in document.data if str(key) in _VENDORS]:
            text = f"has no effect: devices that are not NVIDIA's: {', '.join(others)}"
            draft.note(Origin(document, str(others[0])), text)
        if file.nvidia is not None:
            sections.append((Origin(document, "nvidia"), file.nvidia))
        for path, given in (
            ("nodeconfig", file.nodeconfig),
            ("nvidia.nodeconfig", file.nvidia.nodeconfig if file.nvidia else ()),
        ):
            told += [(Origin(document, f"{path}[{n}]"), node) for n, node in enumerate(given)]

    if len(sections) > 1:
        first, second = sections[0][0].document, sections[1][0].document
        raise second.error("nvidia", f"{first.file} has this section too; give one of them")

    section = sections[0] if sections else (Origin(documents[0], ""), _Nvidia())
    _lay_out(draft, section, _own(told, circumstances))
    return draft.converted()


def _own(
    told: Sequence[tuple[Origin, _Node]], circumstances: Circumstances
) -> tuple[Origin, _Node] | None:
    """Find what is said of this node, `None` when nothing is."""
    if told and circumstances.node is None:
        origin, _ = told[0]
        listed = origin.path.rpartition("[")[0]
        problem = "it goes by the node's name, which is not known; give --node-name"
        raise origin.document.error(listed, problem)

    return next((each for each in told if each[1].name == circumstances.node), None)


def _lay_out(
    draft: Draft, section: tuple[Origin, _Nvidia], own: tuple[Origin, _Node] | None
) -> None:
    at, nvidia = section
    origin, node = own or (at, _Node(""))

    excluded = node.filterdevices
    for gpus in (
        *([selection.indices(excluded.index)] if excluded.index else []),
        *([{"uuid": list(excluded.uuid)}] if excluded.uuid else []),
    ):
        draft.pool(
            "filterdevices", gpus, [], Origin(origin.document, _under(origin, "filterdevices"))
        )

    if node.operatingmode == "mig":
        _lay_out_mig(draft, at, nvidia, origin)
        return

    split, where = nvidia.device_split_count, Origin(at.document, _under(at, "deviceSplitCount"))
    if node.devicesplitcount is not None:
        split = node.devicesplitcount
        where = Origin(origin.document, _under(origin, "devicesplitcount"))
    cut = cuts.fraction(nvidia.resource_count_name, shares=_SPLIT if split is None else split)
    if node.operatingmode == "mps":
        cut = cuts.mps(nvidia.resource_count_name, _SPLIT if split is None else split)
    elif nvidia.default_memory > 0:
        cut = cuts.fraction(nvidia.resource_count_name, unit_mib=nvidia.default_memory)
        if split is not None:
            text = f"has no effect: defaultMemory makes parts of {nvidia.default_memory} MiB"
            draft.note(where, text)
    draft.pool(node.operatingmode, None, [cut], where if split is not None else origin)


def _lay_out_mig(draft: Draft, at: Origin, nvidia: _Nvidia, origin: Origin) -> None:
    """Offer the profiles that each model may have; GPUs of other models are left alone."""
    tables: list[tuple[str, Iterable[_Allowed | _Geometries]]] = [
        ("migProfileAllowlist", nvidia.mig_profile_allowlist),
        ("knownMigGeometries", nvidia.known_mig_geometries),
    ]
    given = [(key, [*rows]) for key, rows in tables if rows]
    [key, rows] = given[0] if given else ("", [])
    if not rows:
        problem = (
            "operatingmode mig needs the profiles of each model; give migProfileAllowlist or "
            "knownMigGeometries"
        )
        raise _error(origin, "operatingmode", problem)

    for number, row in enumerate(rows):
        here = Origin(at.document, f"{_under(at, key)}[{number}]")
        if not row.models or not row.profiles:
            raise here.document.error(here.path, "models and profiles have to be named")
        gpus: Data = selection.containing(row.models)
        draft.pool(row.models[0], gpus, [cuts.mig_on_demand(_named(row.profiles))], here)

    for other, _ in given[1:]:
        draft.note(Origin(at.document, _under(at, other)), f"has no effect: {key} is given")
    if key == "knownMigGeometries":
        text = (
            "its profiles are taken; it would also have kept each GPU to one of its combinations, "
            "and here all are possible that NVML allows"
        )
        draft.note(Origin(at.document, _under(at, key)), text)
    if "resourceCountName" in at.document.at(at.path):
        text = "has no effect in MIG mode: instances have the names of their profiles"
        draft.note(Origin(at.document, _under(at, "resourceCountName")), text)


def _named(profiles: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(_ALIASES.get(name, name) for name in profiles))


def _under(origin: Origin, key: str) -> str:
    return f"{origin.path}.{key}".removeprefix(".")


def _error(origin: Origin, key: str, problem: str) -> ConfigError:
    return origin.document.error(_under(origin, key), problem)
