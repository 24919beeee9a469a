"""Input and output of a conversion: the types that all formats share."""

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec

from metagpu.core.config.config import VERSION
from metagpu.core.config.document import Document
from metagpu.core.config.errors import ConfigError, ConfigReason, at_place
from metagpu.core.model.mig import MigModel

Data = dict[str, Any]
"""Plain data of a part of a configuration."""


class CompatNote(msgspec.Struct, frozen=True):
    """A warning about one key of a foreign file.

    Attributes:
        file: path of the file, or `environment`.
        line: 1-based; 0 where the input has no lines.
        path: the keys that lead to the value.
        text: the effect that the key would have had, or the effect that it has instead.
    """

    file: str
    line: int
    path: str
    text: str

    def __str__(self) -> str:
        return at_place(self.text, self.file, self.line, self.path)


class Origin(msgspec.Struct, frozen=True):
    """The place in a foreign file that a part of a converted configuration comes from."""

    document: Document
    path: str

    def note(self, text: str) -> CompatNote:
        """Return a note about this place."""
        return CompatNote(*self.document.place(self.path), text)


class ConversionContext(msgspec.Struct, frozen=True):
    """Input of a conversion that is in no file.

    Attributes:
        node: the node's name in Kubernetes, `None` when it is not known.
        mig_config: the chosen one of mig-parted's `mig-configs`, or of the layouts of the GPUs.
        environment: environment variables, such as those of NVIDIA's device plugin.
        models: the node's GPUs that support MIG, `None` while they are not known.
    """

    node: str | None = None
    mig_config: str | None = None
    environment: Mapping[str, str] = msgspec.field(default_factory=dict)
    models: tuple[MigModel, ...] | None = None


class ConvertedConfig(msgspec.Struct, frozen=True):
    """A foreign configuration, converted to `metagpu/v1`.

    Attributes:
        data: a `metagpu/v1` document.
        notes: the settings that are not honoured, in the order of the files.
        origins: the place in a foreign file, by path in `data`.
    """

    data: Data
    notes: tuple[CompatNote, ...]
    origins: Mapping[str, Origin]

    def missing_backend(self, installed: Iterable[str]) -> ConfigError | None:
        """Return an error for a needed backend that is not installed, `None` for none."""
        known = sorted(installed)

        for number, pool in enumerate(self.data["pools"]):
            for backend in pool["backends"]:
                if (name := backend["backend"]) not in known:
                    origin = self.origins[f"pools[{number}]"]
                    problem = (
                        f"this needs the backend {name}, which is not installed; "
                        f"there are: {', '.join(known)}"
                    )
                    return origin.document.error(origin.path, problem, ConfigReason.NOT_SERVED)
        return None

    def at_origin(self, error: ConfigError) -> ConfigError:
        """Return an error about `data` as an error about the foreign file."""
        for path in sorted(self.origins, key=len, reverse=True):
            if error.path == path or error.path.startswith((f"{path}.", f"{path}[")):
                origin, problem, reason = self.origins[path], error.problem, error.reason
                if reason is ConfigReason.UNKNOWN_KEY:  # a key that the operator has not written
                    key = error.path.rpartition(".")[2]
                    problem = f"this needs the option {key} of a backend, which has none here"
                    reason = ConfigReason.NOT_SERVED
                ours, theirs = (path_here.rpartition(".")[2] for path_here in (path, origin.path))
                if problem.startswith(f"{ours} "):  # in the words of the operator's file
                    problem = f"{theirs}{problem.removeprefix(ours)}"
                return origin.document.error(origin.path, problem, reason)
        return error


class ConfigDraft:
    """A `metagpu/v1` configuration under construction."""

    def __init__(self) -> None:
        self.notes: list[CompatNote] = []
        self._data: Data = {}
        self._pools: list[Data] = []
        self._origins: dict[str, Origin] = {}

    def set(self, key: str, value: object, origin: Origin) -> None:
        """Set a key of the whole configuration."""
        self._data[key] = value
        self._origins[key] = origin

    def add_pool(
        self,
        name: str,
        gpus: Data | None,
        backends: Sequence[Data],
        origin: Origin,
        *,
        rules: Data | None = None,
        parts: Mapping[str, Origin] = MappingProxyType({}),
    ) -> None:
        """Add a pool after the others; a name that is taken gets a number.

        `gpus` of `None` selects all GPUs; `rules` are further keys of the pool; `parts` has origins
        of its own for values in the pool, by their path in it.
        """
        taken = {pool["name"] for pool in self._pools}
        unique = next(name for name in _unique_names(name) if name not in taken)
        place = f"pools[{len(self._pools)}]"
        self._origins[place] = origin
        self._origins |= {f"{place}.{inner}": at for inner, at in parts.items()}
        self._pools.append(
            {"name": unique, "gpus": gpus or "all", "backends": list(backends), **(rules or {})}
        )

    def add_note(self, origin: Origin, text: str) -> None:
        """Add a note about one key."""
        self.notes.append(origin.note(text))

    def finish(self) -> ConvertedConfig:
        """Return the finished configuration; its data can be written as YAML."""
        data = {"version": VERSION, **self._data, "pools": self._pools}
        order = sorted(self.notes, key=lambda note: (note.file, note.line, note.path))
        return ConvertedConfig(data, tuple(dict.fromkeys(order)), self._origins)


def _unique_names(name: str) -> Iterable[str]:
    yield name
    yield from (f"{name} ({number})" for number in range(2, 10**6))
