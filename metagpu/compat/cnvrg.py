"""MetaGPU's `config.yaml`, by cnvrg.io.

Keys and their effects are those of its last release (0.0.9), read in its source.
"""

from collections.abc import Sequence
from typing import Final

import msgspec

from metagpu.compat import cuts
from metagpu.compat.contract import Circumstances, Converted, Data, Draft, Origin
from metagpu.compat.keys import Unheeded, noted
from metagpu.core.document import Document

_AUTO_SHARES: Final = 100
"""Shares of each GPU with `autoReshare`."""
_TOKENS: Final = "given a token to containers; here the daemon knows its callers by itself"

_UNHEEDED: Final = {
    "processesDiscoveryPeriod": Unheeded("had none in MetaGPU either, which looks every 5 s"),
    "deviceCacheTTL": Unheeded("set how often GPUs are read; see `health.rescanPeriod`"),
    "jwtSecret": Unheeded(f"signed tokens and {_TOKENS}"),
    "deviceToken": Unheeded(f"named a token of the operator's and {_TOKENS}"),
    "containerToken": Unheeded(_TOKENS),
    "mgctlTar": Unheeded("named the program that is copied into containers; metagpu has its own"),
    "serverAddr": Unheeded("served MetaGPU's API on TCP; metagpu has a socket on the node"),
    "nodename": Unheeded("told pods of this node from others; here the kubelet tells them"),
    "config": Unheeded("named the folder of this file; use --config", (".",)),
    "verbose": Unheeded("logged more; use --log-level", (False,)),
    "json-log": Unheeded("logged JSON; use --log-format", (False,)),
}


class _Sharing(msgspec.Struct, rename="camel"):
    """One entry of `deviceSharing`: some GPUs and how they are shared."""

    resource_name: str
    uuid: tuple[str, ...]
    auto_reshare: bool = False
    metagpus_per_gpu: int | None = None
    meta_gpus: int | None = None


class _File(msgspec.Struct, rename="camel"):
    """What of the file is honoured."""

    device_sharing: tuple[_Sharing, ...]
    accelerator: str = "nvidia"
    memory_enforcer: bool | None = None
    mgctl_auto_inject: bool | None = None


def convert(documents: Sequence[Document], circumstances: Circumstances) -> Converted:
    """Make fractions of the GPUs of each `deviceSharing`, in their order.

    Raises:
        ConfigError: where MetaGPU would have ended, or could not have worked.
    """
    del circumstances  # it says everything itself
    [document] = documents
    file = document.decode(_File)
    draft = Draft()
    draft.notes += noted(document, _File, _UNHEEDED)

    if file.accelerator != "nvidia":
        raise document.error(
            "accelerator", f"{file.accelerator!r} is not known here; allowed: nvidia"
        )
    if not file.device_sharing:
        raise document.error("deviceSharing", "there is no entry; give at least one")

    if file.mgctl_auto_inject is not None:
        origin = Origin(document, "mgctlAutoInject")
        draft.set("mgctl", {"inPods": file.mgctl_auto_inject}, origin)
    rules = {}
    if file.memory_enforcer is not None:
        rules = {"memoryEnforcement": {"policy": "kill" if file.memory_enforcer else "off"}}
    for number, sharing in enumerate(file.device_sharing):
        origin = Origin(document, f"deviceSharing[{number}]")
        cut = cuts.fraction(sharing.resource_name, shares=_shares(sharing, origin, draft))
        name = sharing.resource_name.rpartition("/")[2]
        draft.pool(name, _gpus(sharing, origin), [cut], origin, rules)

    return draft.converted()


def _gpus(sharing: _Sharing, origin: Origin) -> Data | None:
    path = f"{origin.path}.uuid"

    if not sharing.uuid:
        raise origin.document.error(path, 'no GPU is named; write ["*"] for all')
    if "*" not in sharing.uuid:
        return {"uuid": list(sharing.uuid)}
    if len(sharing.uuid) > 1:
        raise origin.document.error(path, '"*" is all GPUs and stands alone; name GPUs or all')
    return None


def _shares(sharing: _Sharing, origin: Origin, draft: Draft) -> int:
    """Tell how many shares a GPU has.

    MetaGPU reads `metagpusPerGpu` alone, while the file that it ships says `metaGpus`: without
    `autoReshare` that gave no share at all.
    """
    dead = Origin(origin.document, f"{origin.path}.metaGpus")
    per_gpu = Origin(origin.document, f"{origin.path}.metagpusPerGpu")

    if sharing.auto_reshare:
        for given, key in ((sharing.meta_gpus, dead), (sharing.metagpus_per_gpu, per_gpu)):
            if given is not None:
                text = f"has no effect, as in MetaGPU: autoReshare makes {_AUTO_SHARES} shares"
                draft.note(key, text)
        return _AUTO_SHARES
    if sharing.metagpus_per_gpu is not None:
        if sharing.meta_gpus is not None:
            draft.note(dead, "has no effect, as in MetaGPU: metagpusPerGpu is given")
        return sharing.metagpus_per_gpu
    if sharing.meta_gpus is not None:
        draft.note(dead, "taken for metagpusPerGpu, the only one of the two that MetaGPU reads")
        return sharing.meta_gpus

    raise origin.document.error(
        origin.path, "no number of shares; give metagpusPerGpu, or autoReshare: true for 100"
    )
