"""Which format a file has, and the files of one configuration together.

A format's own module is imported when there is a file of it: most nodes have none.
"""

from collections.abc import Sequence
from enum import StrEnum

import msgspec
from msgspec.structs import replace

from metagpu.compat.contract import Circumstances, Converted
from metagpu.core.document import Document
from metagpu.core.errors import ConfigError


class Format(StrEnum):
    """A form of configuration, by the name that people know."""

    OURS = "metagpu/v1"
    CNVRG = "MetaGPU's config.yaml"
    NVIDIA = "NVIDIA device plugin v1"
    MIG_PARTED = "mig-parted's mig-configs"
    HAMI = "HAMi's device-config"


class Recognised(msgspec.Struct, frozen=True):
    """Files of one configuration, each with its format."""

    documents: tuple[Document, ...]
    formats: tuple[Format, ...]

    @property
    def foreign(self) -> bool:
        """Whether they have to be converted."""
        return Format.OURS not in self.formats


_KEYS = (
    "`version: metagpu/v1`, `deviceSharing` (MetaGPU), `flags`, `resources` or `sharing` (NVIDIA's "
    "device plugin), `mig-configs` (mig-parted), `nvidia` or `nodeconfig` (HAMi)"
)


def recognise(document: Document) -> Format:
    """Tell a file's format by its keys; one with a `pools` or another `version` is ours.

    Raises:
        ConfigError: if none of the formats has such keys.
    """
    data = document.data
    if not isinstance(data, dict):
        raise document.error("", f"no configuration; one has {_KEYS}")

    version = str(data.get("version"))
    for form, is_so in (
        (Format.OURS, "pools" in data or version.startswith("metagpu")),
        (Format.CNVRG, "deviceSharing" in data or "accelerator" in data),
        (Format.MIG_PARTED, "mig-configs" in data),
        (Format.HAMI, "nodeconfig" in data or isinstance(data.get("nvidia"), dict)),
        (Format.NVIDIA, version == "v1" or {"flags", "resources", "sharing"} & data.keys()),
    ):
        if is_so:
            return form
    raise document.error("", f"the format is not recognised; a configuration has {_KEYS}")


def together(documents: Sequence[Document]) -> Recognised:
    """Recognise the files of one configuration, and that they belong together.

    Raises:
        ConfigError: if one is not recognised, or they are of formats that do not go together.
    """
    formats = tuple(recognise(document) for document in documents)
    families = {_FAMILY[form] for form in formats}

    if len(families) > 1 or (len(formats) > 1 and families <= {"metagpu", "cnvrg"}):
        raise ConfigError(
            f"{documents[0].file} ({formats[0]}) is given too, and they make no one "
            "configuration; together go NVIDIA's device plugin with mig-parted, and HAMi's files",
            file=f"{documents[1].file} ({formats[1]})",
        )
    return Recognised(tuple(documents), formats)


def convert(recognised: Recognised, circumstances: Circumstances) -> Converted:
    """Say foreign files in our words.

    Raises:
        ConfigError: naming file, line and path, if a file is wrong by its own rules.
    """
    match _FAMILY[recognised.formats[0]]:
        case "cnvrg":
            from metagpu.compat.cnvrg import convert as by_form
        case "hami":
            from metagpu.compat.hami import convert as by_form
        case _:
            from metagpu.compat.nvidia import convert as by_form
    return by_form(recognised.documents, circumstances)


def open_cases(
    documents: Sequence[Document], circumstances: Circumstances
) -> list[tuple[str, Circumstances]]:
    """Name what these files leave open, and close it in every way: layouts of MIG, and nodes.

    What is given in the circumstances is not open; with nothing open there is one case, of no name.

    Raises:
        ConfigError: if a file is not recognised, or has no usable list of them.
    """
    forms = [(document, recognise(document)) for document in documents]
    layouts: list[str] = []
    nodes: list[str] = []

    for document, form in forms:
        if form is Format.MIG_PARTED and circumstances.mig_config is None:
            from metagpu.compat import mig_parted

            layouts += mig_parted.names(document)
        elif form is Format.HAMI and circumstances.node is None:
            from metagpu.compat import hami

            nodes += hami.nodes(document)

    if len(layouts) > 1:
        return [(f"layout {name}", replace(circumstances, mig_config=name)) for name in layouts]
    if nodes:
        return [(f"node {name}", replace(circumstances, node=name)) for name in nodes]
    return [("", circumstances)]


_FAMILY = {
    Format.OURS: "metagpu",
    Format.CNVRG: "cnvrg",
    Format.NVIDIA: "nvidia",
    Format.MIG_PARTED: "nvidia",
    Format.HAMI: "hami",
}
