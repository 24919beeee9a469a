"""HAMi's `device-config.yaml`, and the `config.json` of HAMi's device plugin.

Keys are those of HAMi 2.10 and, for `knownMigGeometries`, of 2.9 and older. HAMi's scheduler
divides GPUs by MiB and percents that pods request; the kubelet knows only counts, so here a GPU is
divided by `deviceSplitCount` or into parts of `defaultMemory`.
"""

from collections.abc import Iterable, Sequence
from typing import Final, Literal

import msgspec

from metagpu.compat import backend_options
from metagpu.compat.contract import (
    ConfigDraft,
    ConversionContext,
    ConvertedConfig,
    Data,
    Origin,
)
from metagpu.compat.keys import IgnoredKey, fold_case, ignored_keys
from metagpu.core.config.document import Document
from metagpu.core.config.errors import ConfigReason

_DEFAULT_SPLIT: Final = 10
"""HAMi's own number of pods on a GPU."""
_SECOND_NUMBER: Final = (
    "let a pod request a size in addition to the number of vGPUs; the kubelet counts one number of "
    "a resource, so ask for more shares"
)
_OVERSUBSCRIBED: Final = "given out more than a GPU has; metagpu gives out what is there"
_NUMA: Final = "hidden NUMA nodes; metagpu reports them where the machine does"

IGNORED_KEYS: Final = {
    "nvidia.resourceMemoryName": IgnoredKey(_SECOND_NUMBER),
    "nvidia.resourceMemoryPercentageName": IgnoredKey(_SECOND_NUMBER),
    "nvidia.resourceCoreName": IgnoredKey(_SECOND_NUMBER),
    "nvidia.resourcePriorityName": IgnoredKey("let a pod stop others' kernels; metagpu does not"),
    "nvidia.defaultCores": IgnoredKey("limited a pod's use of SMs; backend mps does that", (0,)),
    "nvidia.defaultGPUNum": IgnoredKey(
        "added a vGPU to pods that name a size alone; a pod names shares here", (1,)
    ),
    "nvidia.deviceMemoryScaling": IgnoredKey(_OVERSUBSCRIBED, (1,)),
    "nvidia.deviceCoreScaling": IgnoredKey(_OVERSUBSCRIBED, (1,)),
    "nvidia.memoryFactor": IgnoredKey("counted memory in larger units", (0, 1)),
    "nvidia.preConfiguredDeviceMemory": IgnoredKey("set the memory of GPUs that do not say", (0,)),
    "nvidia.overwriteEnv": IgnoredKey("hidden all GPUs from pods that ask for none", (False,)),
    "nvidia.gpuCorePolicy": IgnoredKey(
        "limited a pod's use of SMs; backend mps does", ("disable",)
    ),
    "nvidia.disableCoreLimit": IgnoredKey("let pods use all SMs, as here", (True, False)),
    "nvidia.enableNumaTopology": IgnoredKey(_NUMA, (True,)),
    "nvidia.libCudaLogLevel": IgnoredKey("set how much HAMi's library logs; metagpu has none"),
    "nvidia.runtimeClassName": IgnoredKey("given pods a runtime class; name it in the pod"),
    **{
        f"{place}nodeconfig.{key}": ignored
        for place in ("", "nvidia.")
        for key, ignored in {
            "devicememoryscaling": IgnoredKey(_OVERSUBSCRIBED, (1,)),
            "devicecorescaling": IgnoredKey(_OVERSUBSCRIBED, (1,)),
            "preconfigureddevicememory": IgnoredKey("set the memory of GPUs that do not say", (0,)),
            "enablenumatopology": IgnoredKey(_NUMA, (True,)),
            "enablegetpreferredallocation": IgnoredKey(
                "left the choice of GPUs to the kubelet; metagpu proposes one", (True,)
            ),
            "migstrategy": IgnoredKey(
                "named MIG instances; metagpu names them by profile", ("none", "mixed")
            ),
        }.items()
    },
}


class _HamiProfile(msgspec.Struct):
    """A profile in one of HAMi's geometries; NVML gives its size and number."""

    name: str
    memory: int | None = None
    count: int | None = None
    core: int | None = None


class _HamiGeometries(msgspec.Struct, rename="camel"):
    """The profiles of some models, up to HAMi 2.9."""

    models: tuple[str, ...]
    allowed_geometries: tuple[tuple[_HamiProfile, ...], ...]

    @property
    def profiles(self) -> tuple[str, ...]:
        """Every profile of the geometries, once."""
        return tuple(dict.fromkeys(i.name for group in self.allowed_geometries for i in group))


class _HamiAllowlist(msgspec.Struct):
    """The profiles of some models, from HAMi 2.10 on."""

    models: tuple[str, ...]
    profiles: tuple[str, ...]


class _HamiFilter(msgspec.Struct):
    """GPUs that HAMi does not use."""

    uuid: tuple[str, ...] = ()
    index: tuple[int, ...] = ()


class _HamiNode(msgspec.Struct):
    """Settings of one node."""

    name: str
    operatingmode: Literal["hami-core", "mig", "mps"] = "hami-core"
    devicesplitcount: int | None = None
    filterdevices: _HamiFilter = msgspec.field(default_factory=_HamiFilter)


class _HamiNvidia(msgspec.Struct, rename="camel"):
    """The section `nvidia`."""

    resource_count_name: str = "nvidia.com/gpu"
    device_split_count: int | None = None
    default_memory: int = 0
    known_mig_geometries: tuple[_HamiGeometries, ...] = ()
    mig_profile_allowlist: tuple[_HamiAllowlist, ...] = ()
    nodeconfig: tuple[_HamiNode, ...] = ()


class HamiFile(msgspec.Struct):
    """The honoured keys of either file."""

    nvidia: _HamiNvidia | None = None
    nodeconfig: tuple[_HamiNode, ...] = ()


_VENDORS: Final = (
    *("amd", "ascend", "awsneuron", "biren", "cambricon", "enflame", "hygon", "iluvatar"),
    *("iluvatars",),
    *("kunlun", "kunlunxin", "metax", "mthreads", "vastai", "vnpus"),
)
"""Sections of other vendors' devices."""


def node_names(document: Document) -> list[str]:
    """Return the names of the nodes that have settings in a file.

    Raises:
        ConfigError: the file breaks HAMi's rules.
    """
    file = _read(document)
    inner = file.nvidia.nodeconfig if file.nvidia else ()
    return [node.name for node in (*file.nodeconfig, *inner)]


def _read(document: Document) -> HamiFile:
    if document.is_json:  # Go's JSON takes keys in any case, its YAML does not
        fold_case(document, HamiFile, IGNORED_KEYS)
    return document.decode(HamiFile)


def convert(documents: Sequence[Document], context: ConversionContext) -> ConvertedConfig:
    """Offer what HAMi would offer on this node, as far as counts can express it.

    Raises:
        ConfigError: if a file is wrong, or nodes differ and the node's name is not known.
    """
    draft = ConfigDraft()
    sections: list[tuple[Origin, _HamiNvidia]] = []
    nodes: list[tuple[Origin, _HamiNode]] = []

    for document in documents:
        file = _read(document)
        draft.notes += [
            note
            for note in ignored_keys(document, HamiFile, IGNORED_KEYS)
            if note.path not in _VENDORS  # one note for all vendors, below
        ]
        if others := [key for key in document.data if str(key) in _VENDORS]:
            text = f"has no effect: devices that are not NVIDIA's: {', '.join(others)}"
            draft.add_note(Origin(document, str(others[0])), text)
        if file.nvidia is not None:
            sections.append((Origin(document, "nvidia"), file.nvidia))
        for path, given in (
            ("nodeconfig", file.nodeconfig),
            ("nvidia.nodeconfig", file.nvidia.nodeconfig if file.nvidia else ()),
        ):
            nodes += [(Origin(document, f"{path}[{n}]"), node) for n, node in enumerate(given)]

    if len(sections) > 1:
        first, second = sections[0][0].document, sections[1][0].document
        problem = f"{first.file} has this section too; give one of them"
        raise second.error("nvidia", problem, ConfigReason.GIVEN_TWICE)

    section = sections[0] if sections else (Origin(documents[0], ""), _HamiNvidia())
    _add_pools(draft, section, _own_node(nodes, context))
    return draft.finish()


def _own_node(
    nodes: Sequence[tuple[Origin, _HamiNode]], context: ConversionContext
) -> tuple[Origin, _HamiNode] | None:
    """Find the settings of this node, `None` where the files have none."""
    if nodes and context.node is None:
        origin, _ = nodes[0]
        listed = origin.path.rpartition("[")[0]
        problem = "the settings depend on the node's name, which is not known; give --node-name"
        raise origin.document.error(listed, problem, ConfigReason.NO_CHOICE)

    return next((each for each in nodes if each[1].name == context.node), None)


def _add_pools(
    draft: ConfigDraft, section: tuple[Origin, _HamiNvidia], own: tuple[Origin, _HamiNode] | None
) -> None:
    at, nvidia = section
    origin, node = own or (at, _HamiNode(""))

    excluded = node.filterdevices
    for gpus in (
        *([backend_options.by_index(excluded.index)] if excluded.index else []),
        *([{"uuid": list(excluded.uuid)}] if excluded.uuid else []),
    ):
        draft.add_pool(
            "filterdevices", gpus, [], Origin(origin.document, _under(origin, "filterdevices"))
        )

    if node.operatingmode == "mig":
        _add_mig_pools(draft, at, nvidia, origin)
        return

    split, where = nvidia.device_split_count, Origin(at.document, _under(at, "deviceSplitCount"))
    if node.devicesplitcount is not None:
        split = node.devicesplitcount
        where = Origin(origin.document, _under(origin, "devicesplitcount"))
    backend = backend_options.fraction(
        nvidia.resource_count_name, shares=_DEFAULT_SPLIT if split is None else split
    )
    if node.operatingmode == "mps":
        backend = backend_options.mps(
            nvidia.resource_count_name, _DEFAULT_SPLIT if split is None else split
        )
    elif nvidia.default_memory > 0:
        backend = backend_options.fraction(
            nvidia.resource_count_name, unit_mib=nvidia.default_memory
        )
        if split is not None:
            text = f"has no effect: defaultMemory makes parts of {nvidia.default_memory} MiB"
            draft.add_note(where, text)
    else:
        count = _DEFAULT_SPLIT if split is None else split
        draft.add_note(
            where if split is not None else origin,
            f"a pod that asks for {nvidia.resource_count_name}: 1 alone has a part of 1/{count} "
            "here; in HAMi it has all memory of a GPU, unless it asks for less (defaultMemory: 0). "
            f"Ask for {count} of one GPU, or set defaultMemory",
        )
    counted = where if split is not None else origin
    parts = {
        "backends[0].sharesPerGpu": where,
        "backends[0].replicas": where,
        "backends[0].resource": Origin(at.document, _under(at, "resourceCountName")),
        "backends[0].memoryUnit": Origin(at.document, _under(at, "defaultMemory")),
    }
    draft.add_pool(node.operatingmode, None, [backend], counted, parts=parts)


def _add_mig_pools(draft: ConfigDraft, at: Origin, nvidia: _HamiNvidia, origin: Origin) -> None:
    """Offer the profiles that each model may have, and no GPUs of other models."""
    tables: list[tuple[str, Iterable[_HamiAllowlist | _HamiGeometries]]] = [
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
        raise origin.document.error(_under(origin, "operatingmode"), problem, ConfigReason.MISSING)

    for number, row in enumerate(rows):
        here = Origin(at.document, f"{_under(at, key)}[{number}]")
        if not row.models or not row.profiles:
            problem = "models and profiles have to be named"
            raise here.document.error(here.path, problem, ConfigReason.MISSING)
        gpus: Data = backend_options.by_model(row.models)
        draft.add_pool(
            row.models[0],
            gpus,
            [backend_options.mig_on_demand(_sizes(row.profiles))],
            here,
        )

    for other, _ in given[1:]:
        draft.add_note(Origin(at.document, _under(at, other)), f"has no effect: {key} is given")
    if key == "knownMigGeometries":
        text = (
            "its profiles are used; HAMi would also limit each GPU to one of its combinations, "
            "and metagpu allows every combination that NVML allows"
        )
        draft.add_note(Origin(at.document, _under(at, key)), text)
    if "resourceCountName" in at.document.at(at.path):
        text = "has no effect in MIG mode: instances have the names of their profiles"
        draft.add_note(Origin(at.document, _under(at, "resourceCountName")), text)


def _sizes(profiles: Sequence[str]) -> list[str]:
    """Return the sizes of profiles: HAMi takes each GPU's own profile of a size."""
    return list(dict.fromkeys(name.partition(".")[0] for name in profiles))


def _under(origin: Origin, key: str) -> str:
    return f"{origin.path}.{key}".removeprefix(".")
