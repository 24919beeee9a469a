"""MetaGPU's `config.yaml`, by cnvrg.io.

Keys and their effects are those of MetaGPU's last release (0.0.9), read in its source.
"""

from collections.abc import Sequence
from typing import Final

import msgspec

from metagpu.compat import backend_options, variables
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

_AUTO_SHARES: Final = 100
"""Shares of each GPU with `autoReshare`."""
_TOKENS: Final = "given a token to containers; here the daemon identifies its callers by itself"

IGNORED_KEYS: Final = {
    "processesDiscoveryPeriod": IgnoredKey("had none in MetaGPU either, which checks every 5 s"),
    "deviceCacheTTL": IgnoredKey("set how often GPUs are read; see `health.rescanPeriod`"),
    "jwtSecret": IgnoredKey(f"signed tokens and {_TOKENS}"),
    "deviceToken": IgnoredKey(f"named a token of the operator's and {_TOKENS}"),
    "containerToken": IgnoredKey(_TOKENS),
    "mgctlTar": IgnoredKey("named the program that is copied into containers; metagpu has its own"),
    "serverAddr": IgnoredKey("served MetaGPU's API on TCP; metagpu has a socket on the node"),
    "nodename": IgnoredKey("identified pods of this node; here the kubelet identifies them"),
    "config": IgnoredKey("named the folder of this file; use --config", (".",)),
    "verbose": IgnoredKey("logged more; use --log-level", (False,)),
    "json-log": IgnoredKey("logged JSON; use --log-format", (False,)),
}


class _DeviceSharing(msgspec.Struct, rename="camel"):
    """One entry of `deviceSharing`: some GPUs and how they are shared."""

    resource_name: str
    uuid: tuple[str, ...]
    auto_reshare: bool = False
    metagpus_per_gpu: int | None = None
    meta_gpus: int | None = None


class CnvrgFile(msgspec.Struct, rename="camel"):
    """The honoured keys of the file; the last three are those of the older form."""

    device_sharing: tuple[_DeviceSharing, ...] | None = None
    accelerator: str = "nvidia"
    memory_enforcer: bool | None = None
    mgctl_auto_inject: bool | None = None
    resource_name: str | None = None
    auto_reshare: bool = False
    meta_gpus: int | None = None

    @property
    def sharings(self) -> tuple[tuple[str, _DeviceSharing], ...]:
        """The entries with their paths; the older form has one, without a list."""
        if self.device_sharing is not None:
            each = enumerate(self.device_sharing)
            return tuple((f"deviceSharing[{number}]", sharing) for number, sharing in each)
        if self.resource_name is None:
            return ()
        one = _DeviceSharing(
            self.resource_name, ("*",), self.auto_reshare, meta_gpus=self.meta_gpus
        )
        return (("", one),)


def convert(documents: Sequence[Document], context: ConversionContext) -> ConvertedConfig:
    """Offer fractions of the GPUs of each `deviceSharing`, in the order of the file.

    Raises:
        ConfigError: MetaGPU would have ended with this file, or could not have worked.
    """
    [document] = documents
    fold_case(document, CnvrgFile, IGNORED_KEYS)
    file = document.decode(CnvrgFile)
    draft = ConfigDraft()
    draft.notes += ignored_keys(document, CnvrgFile, IGNORED_KEYS)

    if file.accelerator != "nvidia":
        raise document.error(
            "accelerator",
            f"{file.accelerator!r} is unknown; allowed: nvidia",
            ConfigReason.UNKNOWN_VALUE,
        )
    if not file.sharings:
        raise document.error(
            "deviceSharing", "there is no entry; give at least one", ConfigReason.MISSING
        )

    switches = variables.read_switches(
        document,
        context.environment,
        memory_enforcer=file.memory_enforcer,
        mgctl_auto_inject=file.mgctl_auto_inject,
    )
    variables.set_mgctl(draft, switches)
    draft.notes += variables.cnvrg_variable_notes(context.environment)
    rules = switches.rules
    for path, sharing in file.sharings:
        origin = Origin(document, path)
        backend = backend_options.fraction(
            sharing.resource_name, shares=_shares(sharing, origin, draft), metagpu_env=True
        )
        name = sharing.resource_name.rpartition("/")[2]
        parts = {
            inner: Origin(document, f"{path}.{key}".removeprefix("."))
            for inner, key in (
                ("gpus.uuid", "uuid"),
                ("backends[0].resource", "resourceName"),
                ("backends[0].sharesPerGpu", _count_key(sharing)),
            )
        }
        gpus = _gpus(sharing, origin)
        draft.add_pool(name, gpus, [backend], origin, rules=rules, parts=parts)

    return draft.finish()


def _gpus(sharing: _DeviceSharing, origin: Origin) -> Data | None:
    path = f"{origin.path}.uuid"

    if not sharing.uuid:
        raise origin.document.error(
            path, 'no GPU is named; write ["*"] for all', ConfigReason.MISSING
        )
    if "*" not in sharing.uuid:
        return {"uuid": list(sharing.uuid)}
    if len(sharing.uuid) > 1:
        problem = '"*" is all GPUs and stands alone; name GPUs or all'
        raise origin.document.error(path, problem, ConfigReason.CONFLICT)
    return None


def _count_key(sharing: _DeviceSharing) -> str:
    """Return the key that gives the number of shares."""
    if sharing.auto_reshare:
        return "autoReshare"
    return "metaGpus" if sharing.metagpus_per_gpu is None else "metagpusPerGpu"


def _shares(sharing: _DeviceSharing, origin: Origin, draft: ConfigDraft) -> int:
    """Return the number of shares of a GPU.

    MetaGPU reads `metagpusPerGpu` alone, while the file that MetaGPU ships has `metaGpus`: without
    `autoReshare` such a file gave no share at all.
    """
    unread = Origin(origin.document, f"{origin.path}.metaGpus".removeprefix("."))
    per_gpu = Origin(origin.document, f"{origin.path}.metagpusPerGpu")

    if sharing.auto_reshare:
        for given, key in ((sharing.meta_gpus, unread), (sharing.metagpus_per_gpu, per_gpu)):
            if given is not None:
                text = f"has no effect, as in MetaGPU: autoReshare makes {_AUTO_SHARES} shares"
                draft.add_note(key, text)
        return _AUTO_SHARES
    if sharing.metagpus_per_gpu is not None:
        if sharing.meta_gpus is not None:
            draft.add_note(unread, "has no effect, as in MetaGPU: metagpusPerGpu is given")
        return sharing.metagpus_per_gpu
    if sharing.meta_gpus is not None:
        draft.add_note(
            unread, "taken for metagpusPerGpu, the only key of the two that MetaGPU reads"
        )
        return sharing.meta_gpus

    raise origin.document.error(
        origin.path,
        "no number of shares; give metagpusPerGpu, or autoReshare: true for 100",
        ConfigReason.MISSING,
    )
