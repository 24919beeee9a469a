"""Formats of configuration files: recognition, conversion, ConfigMaps as files.

A ConfigMap is read as `kubectl get -o yaml` writes it, or for `kubectl apply`: each key of `data`
is a file of its own, and its line numbers are those of the manifest. Other objects are named and
left out. A format's own module is imported when a file of the format is given: most nodes have
none.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from metagpu.compat.contract import CompatNote, ConversionContext, ConvertedConfig, Origin
from metagpu.compat.kube_yaml import GoLoader
from metagpu.core.config.document import Document
from metagpu.core.config.errors import ConfigError, ConfigReason, suggest
from metagpu.core.config.paths import join_path, key_path
from metagpu.core.model.mig import MigModel


class ConfigFormat(StrEnum):
    """Format of a configuration file, by its usual name."""

    OURS = "metagpu/v1"
    CNVRG = "MetaGPU's config.yaml"
    NVIDIA = "NVIDIA device plugin v1"
    MIG_PARTED = "mig-parted's mig-configs"
    HAMI = "HAMi's device-config"


class RecognizedFiles(msgspec.Struct, frozen=True):
    """Files of one configuration, each with its format; none for the default one."""

    documents: tuple[Document, ...] = ()
    formats: tuple[ConfigFormat, ...] = ()

    @property
    def is_foreign(self) -> bool:
        """True when the files have to be converted."""
        return ConfigFormat.OURS not in self.formats

    @property
    def lacks_layouts(self) -> bool:
        """True when layouts may be made from the GPUs, as the MIG manager does."""
        return {*self.formats} <= {ConfigFormat.NVIDIA}

    def with_layouts(self, models: Sequence[MigModel]) -> "RecognizedFiles":
        """Return the files, and the layouts that are made from these GPUs."""
        from metagpu.compat.mig_parted import make_layouts

        documents = (*self.documents, make_layouts(models))
        return RecognizedFiles(documents, (*self.formats, ConfigFormat.MIG_PARTED))


def layout_names(files: RecognizedFiles) -> tuple[str, ...]:
    """Return the names of the layouts in files.

    Raises:
        ConfigError: a file breaks mig-parted's rules.
    """
    from metagpu.compat import mig_parted

    documents = zip(files.documents, files.formats, strict=True)
    layouts = [each for each, form in documents if form is ConfigFormat.MIG_PARTED]
    return tuple(name for each in layouts for name in mig_parted.layout_names(each))


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
        (  # its defaults
            ConfigFormat.NVIDIA,
            version in {"v1", "", "None"} and folded <= {"version", "resources"},
        ),
    ):
        if matches:
            if form in _READ_BY_GO:
                document.read_by(GoLoader)
            return form
    for key in sorted(keys - {*_OF_FORMATS}):
        if near := suggest(key, _OF_FORMATS):
            problem = f"no format has this key at the top{near}"
            raise document.error(key, problem, ConfigReason.UNKNOWN_KEY)
    problem = f"the format is not recognized; a configuration has {_KEYS}"
    raise document.error("", problem, ConfigReason.UNKNOWN_FORMAT)


_READ_BY_GO: Final = frozenset((ConfigFormat.NVIDIA, ConfigFormat.MIG_PARTED))
"""The formats whose programs read YAML as kubectl does."""


def part_of(document: Document) -> tuple[str, str]:
    """Return a document's family of formats, and its part in a configuration.

    Raises:
        ConfigError: the document is not recognized.
    """
    form = recognize(document)
    has_devices = form is ConfigFormat.HAMI and "nvidia" in document.data
    return _FAMILY[form], "nvidia" if has_devices else form


def recognize_files(documents: Sequence[Document]) -> RecognizedFiles:
    """Recognize the files of one configuration, and check that they belong together.

    Raises:
        ConfigError: a file is not recognized, or two formats cannot be combined.
    """
    if not documents:
        return RecognizedFiles()
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

    if layouts:
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


_MAX_DOCUMENTS: Final = 200
"""Of one file; with more it is read_manifest as one document, and refused."""

Texts = Mapping[str, tuple[str, int]]
"""Files of ConfigMaps by name: each with its text and its first line."""


class Manifest(msgspec.Struct, frozen=True):
    """The files in a manifest's ConfigMaps, and notes about its other objects."""

    texts: Texts
    rest: tuple[CompatNote, ...] = ()


def split_documents(text: str) -> list[tuple[str, int]]:
    """Split a stream of YAML documents into texts, each with its first line.

    Empty ones are left out. Three dashes at the begin of a line always begin a document.
    """
    parts: list[tuple[list[str], int]] = [([], 1)]
    for number, line in enumerate(text.split("\n"), 1):
        if re.match(r"---(\s|$)", line):
            parts.append(([], number))
        parts[-1][0].append(line)
    full = [("\n".join(lines), first) for lines, first in parts if any(map(_says_something, lines))]
    return full if len(full) <= _MAX_DOCUMENTS else [(text, 1)]


def read_manifest(documents: Sequence[Document]) -> Manifest | None:
    """Return the files in a manifest's ConfigMaps, `None` for no manifest.

    Of several ConfigMaps, the keys that are configurations count.

    Raises:
        ConfigError: a ConfigMap has no file, two have a file of one name, or there is none.
    """
    objects = [each for document in documents for each in _objects(Origin(document, ""))]
    if not objects or not all(map(_is_object, objects)):
        return None
    maps = [each for each in objects if _kind(each) == "ConfigMap"]
    rest = [each.note(_left_out(each)) for each in objects if each not in maps]
    if not maps:
        first = objects[0]
        problem = "there is no ConfigMap in this manifest; add one"
        raise first.document.error(first.path, problem, ConfigReason.UNKNOWN_FORMAT)

    found: dict[str, tuple[str, int]] = {}
    for each in maps:
        for name, (text, line) in _texts(each).items():
            place = Origin(each.document, key_path(join_path(each.path, "data"), name))
            if len(maps) > 1 and not _is_configuration(text):
                rest.append(place.note("is no configuration, and is left out"))
            elif name in found:
                problem = f"another ConfigMap of this manifest has {name} too; keep one of them"
                raise place.document.error(place.path, problem, ConfigReason.GIVEN_TWICE)
            else:
                found[name] = text, line
    return Manifest(found, tuple(rest))


def _says_something(line: str) -> bool:
    return re.match(r"[ \t]*(#|$|---[ \t]*(#|$))", line) is None


def _objects(origin: Origin) -> Iterator[Origin]:
    """Yield an object, or the items of a list of objects."""
    value = _value(origin)
    if isinstance(value, dict) and str(value.get("kind")).endswith("List"):
        for number, _ in enumerate(value.get("items") or ()):
            yield from _objects(Origin(origin.document, join_path(origin.path, f"items[{number}]")))
    else:
        yield origin


def _is_object(origin: Origin) -> bool:
    value = _value(origin)
    return isinstance(value, dict) and "apiVersion" in value


def _kind(origin: Origin) -> str:
    return str(_value(origin).get("kind", "ConfigMap"))


def _left_out(origin: Origin) -> str:
    metadata = _value(origin).get("metadata")
    name = metadata.get("name", "") if isinstance(metadata, dict) else ""
    return f"{_kind(origin)} {name}".strip() + " is no ConfigMap, and is left out"


def _texts(origin: Origin) -> Texts:
    document, place = origin.document, join_path(origin.path, "data")
    data = _value(origin).get("data")
    if not isinstance(data, dict) or not data:
        problem = "there is no file in this ConfigMap; each key of `data` is one"
        raise document.error(place, problem, ConfigReason.MISSING)

    found = {}
    for name, text in data.items():
        path = key_path(place, name)
        if not isinstance(text, str):
            problem = "not a text; write `|` after the colon"
            raise document.error(path, problem, ConfigReason.WRONG_TYPE)
        # The text of a block begins below its `|`; other texts stand where their key does.
        found[str(name)] = (text, document.line(path) + ("\n" in text))
    return found


def _is_configuration(text: str) -> bool:
    try:
        recognize(Document(text, ""))
    except ConfigError:
        return False
    return True


def _value(origin: Origin) -> Any:  # noqa: ANN401 - YAML holds anything
    return origin.document.at(origin.path)
