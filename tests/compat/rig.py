"""Conversions for tests: texts in; plain data, notes and shares out."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, Final, TypedDict, Unpack

import pytest

from metagpu.agent.config_source import to_yaml
from metagpu.compat import cnvrg, formats, hami, mig_parted, nvidia_file
from metagpu.compat.contract import ConversionContext, ConvertedConfig
from metagpu.core.config.config import Config
from metagpu.core.config.document import Document
from metagpu.core.config.errors import ConfigError
from metagpu.core.grants.injection import Injection
from metagpu.core.layout.layout import Layout, build_layout
from metagpu.core.model.gpu import Gpu, GpuId
from metagpu.core.model.mig import MigInstance
from tests.rigs.build import BACKENDS

FILES: Final = Path(__file__).parent / "files"
FILE_STRUCTS: Final[Mapping[ModuleType, type]] = {
    cnvrg: cnvrg.CnvrgFile,
    hami: hami.HamiFile,
    mig_parted: mig_parted.MigPartedFile,
    nvidia_file: nvidia_file.NvidiaFile,
}
"""The struct that each format's file is decoded as."""


def document(text: str, file: str = "f.yaml") -> Document:
    """Read a text as a file; of a ConfigMap with one file, return that file."""
    read = Document(text, file)
    if (found := formats.read_manifest([read])) is not None:
        [(part, line)] = found.texts.values()
        return Document(part, file, line)
    return read


class ContextFields(TypedDict, total=False):
    """Fields of `ConversionContext`."""

    node: str | None
    mig_config: str | None
    environment: Mapping[str, str]


def converted(*texts: str, **context: Unpack[ContextFields]) -> ConvertedConfig:
    """Convert the files of one configuration; they are called f.yaml, g.yaml and so on.

    The only layout of a file is chosen, unless `mig_config` says otherwise.
    """
    documents = [document(text, f"{chr(ord('f') + n)}.yaml") for n, text in enumerate(texts)]
    data = [each.data for each in documents if isinstance(each.data, dict)]
    layouts = [name for each in data for name in each.get("mig-configs") or ()]
    if len(layouts) == 1 and context.get("mig_config") is None:
        context["mig_config"] = layouts[0]
    return formats.convert(formats.recognize_files(documents), ConversionContext(**context))


def pools(*texts: str, **context: Unpack[ContextFields]) -> list[dict[str, Any]]:
    """Convert, and return the pools."""
    found: list[dict[str, Any]] = converted(*texts, **context).data["pools"]
    return found


def notes(*texts: str, **context: Unpack[ContextFields]) -> list[str]:
    """Convert, and return the operator's notes."""
    return list(map(str, converted(*texts, **context).notes))


def refusal(*texts: str, **context: Unpack[ContextFields]) -> str:
    """Return the message that refuses files, at the conversion or at reading its result."""
    with pytest.raises(ConfigError) as caught:
        offered(converted(*texts, **context))
    return str(caught.value)


def layout_of(
    conversion: ConvertedConfig,
    *gpus: Gpu,
    existing: Mapping[GpuId, Sequence[MigInstance]] = MappingProxyType({}),
) -> Layout:
    """Apply the result to some GPUs.

    Raises:
        ConfigError: with the line of the cause.
    """
    if (missing := conversion.missing_backend(BACKENDS)) is not None:
        raise missing
    try:
        config = Config(Document(to_yaml(conversion.data), "<converted>"), BACKENDS)
        return build_layout(config, gpus, Injection(), existing)
    except ConfigError as error:
        raise conversion.at_origin(error) from None


def offered(
    conversion: ConvertedConfig,
    *gpus: Gpu,
    existing: Mapping[GpuId, Sequence[MigInstance]] = MappingProxyType({}),
) -> dict[str, int]:
    """Count the shares of some GPUs by resource name; raise the errors of `layout_of`."""
    layout = layout_of(conversion, *gpus, existing=existing)
    return {
        resource: sum(share.resource == resource for share in layout.shares)
        for resource in layout.backends
    }
