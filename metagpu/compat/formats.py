"""Formats of configuration files: their recognition, and their conversion.

A format's own module is imported when a file of the format is given: most nodes have none.
"""

from collections.abc import Sequence
from enum import StrEnum

import msgspec
from msgspec.structs import replace

from metagpu.compat.contract import ConversionContext, ConvertedConfig
from metagpu.core.config.document import Document
from metagpu.core.config.errors import ConfigError, ConfigReason
from metagpu.core.config.suggestions import suggest


class ConfigFormat(StrEnum):
    """Format of a configuration file, by its usual name."""

    OURS = "metagpu/v1"
    CNVRG = "MetaGPU's config.yaml"
    NVIDIA = "NVIDIA device plugin v1"
    MIG_PARTED = "mig-parted's mig-configs"
    HAMI = "HAMi's device-config"


class RecognizedFiles(msgspec.Struct, frozen=True):
    """Files of one configuration, each with its format."""

    documents: tuple[Document, ...]
    formats: tuple[ConfigFormat, ...]

    @property
    def is_foreign(self) -> bool:
        """True when the files have to be converted."""
        return ConfigFormat.OURS not in self.formats


_KEYS = (
    "`version: metagpu/v1`, `deviceSharing` (MetaGPU), `flags`, `resources` or `sharing` (NVIDIA's "
    "device plugin), `mig-configs` (mig-parted), `nvidia` or `nodeconfig` (HAMi)"
)

_OF_FORMATS = (
    *("pools", "deviceSharing", "flags", "resources", "sharing", "imex"),
    *("mig-configs", "nvidia", "nodeconfig"),
)
"""The keys by which a format is recognized."""


def recognize(document: Document) -> ConfigFormat:
    """Return a file's format by its keys; a file with `pools` is metagpu's own.

    Raises:
        ConfigError: no format has these keys.
    """
    data = document.data
    if not isinstance(data, dict):
        problem = f"not a configuration; a configuration has {_KEYS}"
        raise document.error("", problem, ConfigReason.UNKNOWN_FORMAT)

    version = str(data.get("version"))
    keys = {str(key) for key in data}
    folded = {key.lower() for key in keys}  # of programs that take keys in any case
    for form, matches in (
        (ConfigFormat.OURS, "pools" in keys or version.startswith("metagpu")),
        (ConfigFormat.CNVRG, not {"devicesharing", "accelerator"}.isdisjoint(folded)),
        (ConfigFormat.MIG_PARTED, "mig-configs" in keys),
        (ConfigFormat.HAMI, "nodeconfig" in folded or isinstance(data.get("nvidia"), dict)),
        (ConfigFormat.NVIDIA, not {"flags", "sharing", "imex"}.isdisjoint(folded)),
        (ConfigFormat.NVIDIA, version == "v1" and folded <= {"version", "resources"}),
    ):
        if matches:
            return form
    for key in sorted(keys - {*_OF_FORMATS}):
        if near := suggest(key, _OF_FORMATS):
            problem = f"no format has this key at the top{near}"
            raise document.error(key, problem, ConfigReason.UNKNOWN_KEY)
    problem = f"the format is not recognized; a configuration has {_KEYS}"
    raise document.error("", problem, ConfigReason.UNKNOWN_FORMAT)


def recognize_files(documents: Sequence[Document]) -> RecognizedFiles:
    """Recognize the files of one configuration, and check that they belong together.

    Raises:
        ConfigError: a file is not recognized, or two formats cannot be combined.
    """
    formats = tuple(recognize(document) for document in documents)
    families = {_FAMILY[form] for form in formats}

    if len(families) > 1 or (len(formats) > 1 and families <= {"metagpu", "cnvrg"}):
        raise ConfigError(
            f"{documents[0].file} ({formats[0]}) is given too, and the two cannot be combined; "
            "NVIDIA's device plugin combines with mig-parted, and HAMi's files with each other",
            ConfigReason.CONFLICT,
            file=f"{documents[1].file} ({formats[1]})",
        )
    return RecognizedFiles(tuple(documents), formats)


def convert(recognized: RecognizedFiles, context: ConversionContext) -> ConvertedConfig:
    """Convert foreign files to `metagpu/v1`.

    Raises:
        ConfigError: with file, line and path, if a file is wrong by its format's rules.
    """
    match _FAMILY[recognized.formats[0]]:
        case "cnvrg":
            from metagpu.compat.cnvrg import convert as convert_format
        case "hami":
            from metagpu.compat.hami import convert as convert_format
        case _:
            from metagpu.compat.nvidia import convert as convert_format
    return convert_format(recognized.documents, context)


def list_cases(
    documents: Sequence[Document], context: ConversionContext
) -> list[tuple[str, ConversionContext]]:
    """List every case that these files allow, by MIG layout or node, with its name.

    A choice that the context has already made is no case. Where no choice is open, the list has one
    case with an empty name.

    Raises:
        ConfigError: if a file is not recognized, or its list of layouts or nodes is wrong.
    """
    forms = [(document, recognize(document)) for document in documents]
    layouts: list[str] = []
    nodes: list[str] = []

    for document, form in forms:
        if form is ConfigFormat.MIG_PARTED and context.mig_config is None:
            from metagpu.compat import mig_parted

            layouts += mig_parted.layout_names(document)
        elif form is ConfigFormat.HAMI and context.node is None:
            from metagpu.compat import hami

            nodes += hami.node_names(document)

    if len(layouts) > 1:
        return [(f"layout {name}", replace(context, mig_config=name)) for name in layouts]
    if nodes:
        return [(f"node {name}", replace(context, node=name)) for name in nodes]
    return [("", context)]


_FAMILY = {
    ConfigFormat.OURS: "metagpu",
    ConfigFormat.CNVRG: "cnvrg",
    ConfigFormat.NVIDIA: "nvidia",
    ConfigFormat.MIG_PARTED: "nvidia",
    ConfigFormat.HAMI: "hami",
}
