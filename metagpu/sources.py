"""Where a configuration comes from: files, directories of profiles, ConfigMaps; in any format."""

import os
import stat
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
import yaml
from msgspec.structs import replace

from metagpu.compat import formats, manifest
from metagpu.compat.contract import Circumstances, Converted, Note
from metagpu.core import config as configuration
from metagpu.core import profiles
from metagpu.core.backend import Backend
from metagpu.core.config import Config
from metagpu.core.document import Document
from metagpu.core.errors import ConfigError
from metagpu.core.layout import rehearse

_LARGEST: Final = 16 * 1024 * 1024
"""Bytes of a file; a ConfigMap has at most 1 MiB."""

NOTHING: Final = """\
version: metagpu/v1
pools:
  - name: nothing
    backends: []
"""
"""What runs while nobody has said what shall."""

Backends = Mapping[str, type[Backend]]


class Text(msgspec.Struct, frozen=True):
    """One configuration file as it was read: a part of another file when it is in a ConfigMap.

    Attributes:
        file: what messages call it.
        first_line: the line of `file` at which it begins.
        profile: the name by which it was chosen, `None` where there was no choice.
    """

    file: str
    text: str
    first_line: int = 1
    profile: str | None = None


class Loaded(msgspec.Struct, frozen=True):
    """A configuration that can be used, and where it comes from.

    Attributes:
        config: the configuration.
        text: it, as `metagpu/v1`; what a foreign one was converted to.
        formats: of each file.
        profiles: the chosen ones.
        notes: what of foreign files is not honoured.
    """

    config: Config
    text: str
    formats: tuple[str, ...] = ()
    profiles: tuple[str, ...] = ()
    notes: tuple[Note, ...] = ()


class Source(msgspec.Struct, frozen=True):
    """What an operator says of where the configuration is. Reading blocks.

    Attributes:
        paths: files, and directories of profiles; none means the default configuration.
        choice: which profile is wanted.
        circumstances: what foreign formats need to know beside their files.
        cluster: profiles of the cluster, in whose stead the paths are read if none is chosen.
    """

    paths: tuple[Path, ...] = ()
    choice: profiles.Choice = msgspec.field(default_factory=profiles.Choice)
    circumstances: Circumstances = msgspec.field(default_factory=Circumstances)
    cluster: profiles.Instruction = msgspec.field(default_factory=profiles.Instruction)

    def told(self, cluster: profiles.Instruction) -> "Source":
        """Give this source as the cluster wants it; what is said on this node itself is stronger.

        A flag and the environment come before the node's label, and that before the default
        profile and the file.
        """
        return replace(self, cluster=cluster)

    @property
    def wish(self) -> profiles.Choice:
        """Which profile is wanted, here or by the cluster."""
        label = self.cluster.profile
        if self.choice.wanted is not None or label is None:
            return self.choice
        return replace(self.choice, wanted=label, by=f"label {self.cluster.label}")

    @property
    def situation(self) -> Circumstances:
        """What foreign formats need to know, from here or from the cluster."""
        mig = self.circumstances.mig_config or self.cluster.mig_config
        return replace(self.circumstances, mig_config=mig)

    def read(self) -> tuple[Text, ...]:
        """Read the files, of profiles the chosen ones.

        Raises:
            ConfigError: if one cannot be read, or no profile can be chosen.
        """
        choice = self.wish
        if (held := self.cluster.profiles) is not None and profiles.chooses(held, choice):
            name = profiles.choose(held, choice, self.cluster.place)
            return (Text(f"{self.cluster.place}: {name}", held[name], 1, name),)

        places = [_place(path) for path in self.paths]
        several = [each for each in places if each.several]
        if choice.wanted is not None and choice.required and not several:
            problem = (
                f"it has no profiles, and {choice.by} wants {choice.wanted!r}; a profile is chosen "
                "in a folder or a ConfigMap"
            )
            raise ConfigError(problem, file=places[0].path if places else "<default>")

        somewhere = {
            name
            for name in (choice.wanted, choice.default)
            if name is not None and any(profiles.has(each.texts, name) for each in several)
        }
        return tuple(each.chosen(choice, somewhere) for each in places)

    def variants(self) -> Iterator[tuple[str, "Source"]]:
        """Give this source once for each choice that it leaves open, with a name for it.

        Open are profiles, the layouts of mig-parted and the nodes of HAMi where nothing chooses.

        Raises:
            ConfigError: as `read`.
        """
        choice = self.choice
        names = [
            name
            for path in self.paths
            if (place := _place(path)).several and len(place.texts) > 1
            for name in place.texts
        ]
        if names and choice.wanted is None and choice.default is None:
            for name in dict.fromkeys(names):
                chosen = replace(self, choice=replace(choice, wanted=name))
                for inner, source in chosen.variants():
                    yield f"profile {name}{f', {inner}' if inner else ''}", source
            return

        documents = [Document(each.text, each.file, each.first_line) for each in self.read()]
        cases = formats.open_cases(documents, self.circumstances)
        for name, circumstances in cases:
            yield name, replace(self, circumstances=circumstances)

    def load(self, backends: Backends) -> Loaded:
        """Read the files and understand them.

        Raises:
            ConfigError: as `read` and `understand`.
        """
        return self.understand(self.read(), backends)

    def understand(self, texts: tuple[Text, ...], backends: Backends) -> Loaded:
        """Make a configuration of what was read, foreign formats by conversion.

        Raises:
            ConfigError: naming file, line and path, what is wrong and what is allowed.
        """
        if not texts:
            default = Document(configuration.DEFAULT, "<default>")
            return Loaded(_ours(default, backends), configuration.DEFAULT)

        recognised = _recognised(texts)
        names = tuple(each.profile for each in texts if each.profile is not None)
        forms = tuple(map(str, recognised.formats))

        if not recognised.foreign:
            config = _ours(recognised.documents[0], backends)
            return Loaded(config, texts[0].text, forms, names)

        converted = formats.convert(recognised, self.situation)
        text = written(converted.data)
        file = ", ".join(each.file for each in texts)
        config = _theirs(converted, Document(text, file), backends)
        return Loaded(config, text, forms, names, converted.notes)

    def converted(self, texts: tuple[Text, ...]) -> tuple[str, tuple[Note, ...]]:
        """Say what was read as `metagpu/v1`, whatever is installed; and what is not honoured.

        Raises:
            ConfigError: as `understand`, but for what backends say.
        """
        recognised = _recognised(texts)
        if not recognised.foreign:
            return texts[0].text, ()
        converted = formats.convert(recognised, self.situation)
        return written(converted.data), converted.notes


def _recognised(texts: tuple[Text, ...]) -> formats.Recognised:
    return formats.together([Document(each.text, each.file, each.first_line) for each in texts])


def written(data: Mapping[str, Any]) -> str:
    """Write a configuration as YAML."""
    text: str = yaml.safe_dump(dict(data), sort_keys=False, width=100)
    return text


def _ours(document: Document, backends: Backends) -> Config:
    config = Config(document, backends)
    rehearse(config)
    return config


def _theirs(converted: Converted, document: Document, backends: Backends) -> Config:
    if (missing := converted.missing(backends)) is not None:
        raise missing
    try:
        return _ours(document, backends)
    except ConfigError as error:
        raise converted.retold(error) from None


class _Place(msgspec.Struct, frozen=True):
    """What one path has: one text, or several by the names of profiles; each read when chosen."""

    path: str
    texts: Mapping[str, Callable[[], Text]]
    several: bool

    def chosen(self, choice: profiles.Choice, elsewhere: Collection[str]) -> Text:
        if not self.several:
            return next(iter(self.texts.values()))()
        return self.texts[profiles.choose(self.texts, choice, self.path, elsewhere)]()


def _place(path: Path) -> _Place:
    """Look what a path has; of a directory what a person sees: no names with a dot before."""
    if path.is_dir():
        files = {each.name: each for each in _listed(path) if not each.name.startswith(".")}
        return _Place(
            str(path),
            {name: partial(_profile, file, name) for name, file in files.items()},
            several=True,
        )

    text = Text(str(path), _read(path))
    document = Document(text.text, text.file)
    if not manifest.is_manifest(document):
        return _Place(str(path), {"": lambda: text}, several=False)
    parts = manifest.texts(document)
    return _Place(
        str(path),
        {name: partial(Text, str(path), part, line, name) for name, (part, line) in parts.items()},
        several=True,
    )


def _profile(file: Path, name: str) -> Text:
    return Text(str(file), _read(file), 1, name)


def _listed(directory: Path) -> list[Path]:
    try:
        return sorted(each for each in directory.iterdir() if each.is_file())
    except OSError as error:
        raise _unreadable(directory, error) from error


def _read(file: Path) -> str:
    try:
        if not stat.S_ISREG(file.stat().st_mode):
            raise ConfigError(
                "cannot be read: it is no file, and is read more than once; write "
                "what it says to a file",
                file=os.fspath(file),
            )
        # Opened once: between a look at the size and the reading another file may have come.
        with file.open("rb") as opened:
            raw = opened.read(_LARGEST + 1)
        if len(raw) > _LARGEST:
            raise ConfigError("cannot be read: larger than 16 MiB", file=os.fspath(file))
        return raw.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(file, error) from error


def _unreadable(path: Path, error: OSError | UnicodeDecodeError) -> ConfigError:
    problem = error.strerror if isinstance(error, OSError) else "not a text in UTF-8"
    return ConfigError(f"cannot be read: {problem}", file=os.fspath(path))
