"""The source of a configuration: files, folders of profiles, ConfigMaps."""

import os
import stat
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Final

import msgspec
import yaml
from msgspec.structs import replace

from metagpu.compat import formats, variables
from metagpu.compat.contract import CompatNote, ConversionContext, ConvertedConfig
from metagpu.compat.layout_choice import LayoutChoice, check_no_layouts, choose_layout
from metagpu.core.config import profiles
from metagpu.core.config.config import DEFAULT, Config
from metagpu.core.config.document import MAX_TEXT, Document
from metagpu.core.config.errors import ConfigError, ConfigReason
from metagpu.core.config.paths import parent_path
from metagpu.core.contracts.backend import Backend
from metagpu.core.layout.checks import check_layout

_MAX_BYTES: Final = 4 * MAX_TEXT
"""Of a file: the most that so many characters can take."""

STDIN: Final = Path("-")
"""The path of a configuration on stdin."""
_MAX_ERRORS: Final = 20
"""The errors of one check: after that many, the next ones are seldom independent."""

NO_SHARING: Final = """\
version: metagpu/v1
pools:
  - name: nothing
    backends: []
"""
"""The configuration that runs while the cluster has not chosen one."""

Backends = Mapping[str, type[Backend]]


class ConfigText(msgspec.Struct, frozen=True):
    """The text of one configuration file, or of one profile in a ConfigMap's manifest.

    Attributes:
        file: the file's name in messages.
        first_line: the line of `file` at which the text begins.
        profile: the name of the chosen profile, `None` where there was no choice.
        rest: notes about the other objects of the manifest.
    """

    file: str
    text: str
    first_line: int = 1
    profile: str | None = None
    rest: tuple[CompatNote, ...] = ()

    @property
    def document(self) -> Document:
        """The text, parsed; the texts that were read last are not parsed again."""
        return _parse(self.text, self.file, self.first_line)


class Loaded(msgspec.Struct, frozen=True):
    """A usable configuration, and its origin.

    Attributes:
        config: the configuration.
        text: the same as `metagpu/v1` text; a foreign format is converted.
        formats: the format of each file.
        profiles: the chosen profiles.
        notes: the settings of foreign files that are not honoured.
        layout: the chosen MIG layout.
    """

    config: Config
    text: str
    formats: tuple[str, ...] = ()
    profiles: tuple[str, ...] = ()
    notes: tuple[CompatNote, ...] = ()
    layout: LayoutChoice = LayoutChoice()


class Checked(msgspec.Struct, frozen=True):
    """The outcome of a check.

    Attributes:
        loaded: the configuration; with errors, what remains of it. `None` where nothing does.
        errors: the errors, in the order in which they were found.
    """

    loaded: Loaded | None
    errors: tuple[ConfigError, ...]


class ConfigSource(msgspec.Struct, frozen=True):
    """The operator's settings of where the configuration is. Reading it blocks.

    Attributes:
        paths: files, and folders of profiles; none means the default configuration.
        choice: the wanted profile.
        context: facts that foreign formats need beside their files.
        cluster: the cluster's profiles; the paths are read if none of them is chosen.
        had_default: whether one was in force that no label chose: the paths do not replace it.
        last_layout: the MIG layout that stays if a label names an unknown one.
        awaits_cluster: whether the node's labels will be known, and are not yet.
    """

    paths: tuple[Path, ...] = ()
    choice: profiles.ProfileChoice = msgspec.field(default_factory=profiles.ProfileChoice)
    context: ConversionContext = msgspec.field(default_factory=ConversionContext)
    cluster: profiles.ClusterChoice = msgspec.field(default_factory=profiles.ClusterChoice)
    had_default: bool = False
    last_layout: str | None = None
    awaits_cluster: bool = False

    def with_cluster(self, cluster: profiles.ClusterChoice) -> "ConfigSource":
        """Return this source with the cluster's choice; settings of this node come first.

        A flag and the environment come before the node's label, and the label before the default
        profile and the file.
        """
        return replace(self, cluster=cluster, awaits_cluster=False)

    @property
    def profile_choice(self) -> profiles.ProfileChoice:
        """The wanted profile, chosen here or by the cluster."""
        label = self.cluster.profile
        if self.choice.chosen is not None or label is None:
            return self.choice
        return replace(self.choice, chosen=label, option=f"label {self.cluster.label}")

    @property
    def chooses_in_cluster(self) -> bool:
        """True if one of the cluster's profiles is chosen, be it an invalid one."""
        known = self.cluster.profiles
        return known is not None and profiles.has_choice(known, self.profile_choice)

    @property
    def meaning(self) -> object:
        """Returns what changes the meaning of the same files."""
        return self.effective_context, self.cluster.mig_manager

    @property
    def effective_context(self) -> ConversionContext:
        """Facts that foreign formats need, set here or by the cluster."""
        mig = self.context.mig_config or self.cluster.mig_config
        models = None if mig is None else self.context.models
        return replace(self.context, mig_config=mig, models=models)

    def read(self) -> tuple[ConfigText, ...]:
        """Read the files, and of profiles the chosen ones.

        Raises:
            ConfigError: if one cannot be read, or no profile can be chosen.
        """
        choice = self.profile_choice
        if self.cluster.profiles is not None and (self.had_default or self.chooses_in_cluster):
            known = self.cluster.profiles
            name = profiles.choose_profile(known, choice, self.cluster.source)
            return (ConfigText(f"{self.cluster.source}: {name}", known[name], 1, name),)

        files = [_open_path(path) for path in self.paths]
        several = [each for each in files if each.several]
        if choice.chosen is not None and choice.required and not several:
            problem = (
                f"it has no profiles, and {choice.option} wants {choice.chosen!r}; a profile is "
                "chosen in a folder or a ConfigMap"
            )
            place = files[0].path if files else "<default>"
            raise ConfigError(problem, ConfigReason.UNKNOWN_CHOICE, file=place)

        chosen_elsewhere = {
            name
            for name in (choice.chosen, choice.default)
            if name is not None and any(profiles.has_profile(each.texts, name) for each in several)
        }
        return tuple(each.choose(choice, chosen_elsewhere) for each in files)

    def variants(self) -> Iterator[tuple[str, "ConfigSource"]]:
        """Yield this source once for each open choice, with the choice's name.

        Profiles, the layouts of mig-parted and the nodes of HAMi are open if nothing chooses.

        Raises:
            ConfigError: as `read`.
        """
        choice = self.choice
        names = [
            name
            for path in self.paths
            if (file := _open_path(path)).several and len(file.texts) > 1
            for name in file.texts
        ]
        if names and choice.chosen is None and choice.default is None:
            for name in dict.fromkeys(names):
                chosen = replace(self, choice=replace(choice, chosen=name))
                for inner, source in chosen.variants():
                    yield f"profile {name}{f', {inner}' if inner else ''}", source
            return

        documents = [each.document for each in self.read()]
        cases = formats.list_cases(documents, self.context)
        for name, context in cases:
            yield name, replace(self, context=context)

    def parts(self) -> frozenset[tuple[str, str]]:
        """Return which parts of a configuration the files are, as far as known."""
        found = set()
        with suppress(ConfigError):
            for path in self.paths:
                texts = _open_path(path).texts.values()
                found |= {formats.part_of(read().document) for read in texts}
        return frozenset(found)

    def load(self, backends: Backends) -> Loaded:
        """Read and parse the files.

        Raises:
            ConfigError: as `read` and `parse`.
        """
        loaded = self.parse(self.read(), backends)
        loaded.layout.check()
        return loaded

    def parse(self, texts: tuple[ConfigText, ...], backends: Backends) -> Loaded:
        """Parse texts into a configuration; foreign formats are converted.

        Raises:
            ConfigError: with file, line and path, the error, and the allowed values.
        """
        return self._load(texts, [each.document for each in texts], backends)

    def check(self, backends: Backends) -> "Checked":
        """Read the files, and find their errors, not the first alone.

        After an error, the value that it names counts as absent; what is wrong only because of that
        is no error.

        Raises:
            ConfigError: as `read`.
        """
        texts = self.read()
        errors: list[ConfigError] = []
        try:
            documents = [each.document for each in texts]
            for _ in range(_MAX_ERRORS):
                try:
                    loaded = self._load(texts, documents, backends)
                    loaded.layout.check()
                    return Checked(loaded, tuple(errors))
                except ConfigError as error:
                    if not any(_is_above(error, other) for other in errors):
                        errors.append(error)
                    if (smaller := _without(documents, error)) is None:
                        break
                    documents = smaller
        except ConfigError as error:  # a text cannot be parsed
            errors.append(error)
        return Checked(None, tuple(errors))

    def _load(
        self, texts: tuple[ConfigText, ...], documents: Sequence[Document], backends: Backends
    ) -> Loaded:
        environment = self.context.environment
        files = formats.recognize_files(documents)
        recognised, layout = self._choose_layout(files)
        if not recognised.documents:
            converted = variables.with_variables(environment)
            document = Document(DEFAULT, "<default>")
            text = DEFAULT if converted.data == document.data else to_yaml(converted.data)
            config = _foreign_config(converted, Document(text, "<default>"), backends)
            return Loaded(config, text, notes=(*converted.notes, *layout.notes), layout=layout)

        rest = tuple(note for each in texts for note in each.rest)
        names = tuple(each.profile for each in texts if each.profile is not None)
        forms = tuple(map(str, files.formats))

        if not recognised.is_foreign:
            config = _own_config(recognised.documents[0], backends)
            notes = tuple(variables.own_file_notes(environment))
            return Loaded(config, texts[0].text, forms, names, (*notes, *rest))

        converted = formats.convert(recognised, replace(self.context, mig_config=layout.name))
        text = to_yaml(converted.data)
        file = ", ".join(each.file for each in texts) or "<default>"
        config = _foreign_config(converted, Document(text, file), backends)
        notes = (*converted.notes, *rest, *layout.notes)
        return Loaded(config, text, forms, names, notes, layout)

    def _choose_layout(
        self, files: formats.RecognizedFiles
    ) -> tuple[formats.RecognizedFiles, LayoutChoice]:
        if self.awaits_cluster and self.context.mig_config is None:
            check_no_layouts(files)
        return choose_layout(files, self.context, self.cluster, self.last_layout)

    def convert(self, texts: tuple[ConfigText, ...]) -> tuple[str, tuple[CompatNote, ...]]:
        """Return texts as `metagpu/v1`, and the settings that are not honoured.

        No backend has to be installed.

        Raises:
            ConfigError: as `parse`, but not for a backend's own errors.
        """
        recognised = formats.recognize_files([each.document for each in texts])
        if not recognised.is_foreign:
            return texts[0].text, ()
        recognised, layout = self._choose_layout(recognised)
        layout.check()
        converted = formats.convert(recognised, replace(self.context, mig_config=layout.name))
        return to_yaml(converted.data), converted.notes


def _without(documents: Sequence[Document], error: ConfigError) -> list[Document] | None:
    """Return documents without the value of an error, or the nearest one around it.

    Returns `None` for an error about a whole document.
    """
    path = error.path
    while path:
        for number, document in enumerate(documents):
            if document.file == error.file and (smaller := document.without(path)) is not None:
                return [*documents[:number], smaller, *documents[number + 1 :]]
        path = parent_path(path)
    return None


def _is_above(error: ConfigError, other: ConfigError) -> bool:
    """Return whether an error is about a value that another error is inside of."""
    inside = f"{error.path}.", f"{error.path}["
    return error.file == other.file and (not error.path or f"{other.path}.".startswith(inside))


def to_yaml(data: Mapping[str, Any]) -> str:
    """Return a configuration as YAML text."""
    text: str = yaml.safe_dump(dict(data), sort_keys=False, width=100)
    return text


def _own_config(document: Document, backends: Backends) -> Config:
    config = Config(document, backends)
    check_layout(config)
    return config


def _foreign_config(converted: ConvertedConfig, document: Document, backends: Backends) -> Config:
    if (missing := converted.missing_backend(backends)) is not None:
        raise missing
    try:
        config = Config(document, backends, converted.at_origin)
    except ConfigError as error:
        raise converted.at_origin(error) from None
    check_layout(config)
    return config


@lru_cache(maxsize=4)
def _parse(text: str, file: str, first_line: int) -> Document:
    """Parse a text once; at most four belong together, of 25 MB of memory each."""
    return Document(text, file, first_line)


class _PathTexts(msgspec.Struct, frozen=True):
    """The texts at one path, by profile name; each is read when chosen."""

    path: str
    texts: Mapping[str, Callable[[], ConfigText]]
    several: bool

    def choose(self, choice: profiles.ProfileChoice, elsewhere: Collection[str]) -> ConfigText:
        if not self.several:
            return next(iter(self.texts.values()))()
        return self.texts[profiles.choose_profile(self.texts, choice, self.path, elsewhere)]()


def _open_path(path: Path) -> _PathTexts:
    """List the texts at a path; hidden files of a folder do not count."""
    if path.is_dir():
        files = {each.name: each for each in _list_files(path) if not each.name.startswith(".")}
        return _PathTexts(
            str(path),
            {name: partial(_read_profile, file, name) for name, file in files.items()},
            several=True,
        )

    text = ConfigText(str(path), _read(path))
    documents = [_parse(part, text.file, line) for part, line in formats.split_documents(text.text)]
    found = formats.read_manifest(documents)
    if found is None:
        _ = text.document  # several documents that are no manifests are a mistake
        return _PathTexts(str(path), {"": lambda: text}, several=False)
    return _PathTexts(
        str(path),
        {
            name: partial(ConfigText, str(path), part, line, name, found.rest)
            for name, (part, line) in found.texts.items()
        },
        several=True,
    )


def _read_profile(file: Path, name: str) -> ConfigText:
    return ConfigText(str(file), _read(file), 1, name)


def _list_files(directory: Path) -> list[Path]:
    try:
        return sorted(each for each in directory.iterdir() if each.is_file())
    except OSError as error:
        raise _unreadable(directory, error) from error


@lru_cache(maxsize=1)
def _read_stdin() -> bytes:
    """Read stdin once: a configuration is read more than once."""
    return sys.stdin.buffer.read(_MAX_BYTES + 1)


def _read(file: Path) -> str:
    try:
        if file == STDIN:
            raw = _read_stdin()
        elif not stat.S_ISREG(file.stat().st_mode):
            raise ConfigError(
                "cannot be read: it is not a regular file, and it has to be read more than once; "
                "write its text to a file",
                ConfigReason.UNREADABLE,
                file=os.fspath(file),
            )
        else:
            # Opened once: another file may replace it between a check of its size and the read.
            with file.open("rb") as opened:
                raw = opened.read(_MAX_BYTES + 1)
        if len(raw) > _MAX_BYTES:
            problem = f"cannot be read: more than {_MAX_BYTES} bytes"
            raise ConfigError(problem, ConfigReason.TOO_LARGE, file=os.fspath(file))
        return raw.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(file, error) from error


def _unreadable(path: Path, error: OSError | UnicodeDecodeError) -> ConfigError:
    problem = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
    return ConfigError(f"cannot be read: {problem}", ConfigReason.UNREADABLE, file=os.fspath(path))
