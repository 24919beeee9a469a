"""What a conversion is given and what it gives: the words that all formats share."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from metagpu.core.config import VERSION
from metagpu.core.document import Document
from metagpu.core.errors import ConfigError

Data = dict[str, Any]
"""Plain data of a part of a configuration."""


class Note(msgspec.Struct, frozen=True):
    """What an operator should know of one key: a warning, never a refusal.

    Attributes:
        file: path of the file, or `environment`.
        line: 1-based, 0 where there are no lines.
        path: keys to the value.
        text: what the key would have done, or what is done instead.
    """

    file: str
    line: int
    path: str
    text: str

    def __str__(self) -> str:
        return str(ConfigError(self.text, file=self.file, line=self.line, path=self.path))


class Origin(msgspec.Struct, frozen=True):
    """Where something in a converted configuration comes from."""

    document: Document
    path: str

    def note(self, text: str) -> Note:
        """Make the note for what stands here."""
        return Note(self.document.file, self.document.line(self.path), self.path, text)


class Circumstances(msgspec.Struct, frozen=True):
    """What a conversion needs and no file says.

    Attributes:
        node: the node's name in Kubernetes, `None` when it is not known.
        mig_config: which of mig-parted's `mig-configs` is wanted.
        environment: variables, of which those of NVIDIA's device plugin count.
    """

    node: str | None = None
    mig_config: str | None = None
    environment: Mapping[str, str] = msgspec.field(default_factory=dict)


class Converted(msgspec.Struct, frozen=True):
    """A foreign configuration in our words.

    Attributes:
        data: a `metagpu/v1` document.
        notes: in the order of the files.
        origins: for paths of `data`, where that comes from.
    """

    data: Data
    notes: tuple[Note, ...]
    origins: Mapping[str, Origin]

    def missing(self, installed: Iterable[str]) -> ConfigError | None:
        """Make the error for a backend that this needs and that is not installed."""
        known = sorted(installed)

        for number, pool in enumerate(self.data["pools"]):
            for backend in pool["backends"]:
                if (name := backend["backend"]) not in known:
                    origin = self.origins[f"pools[{number}]"]
                    problem = (
                        f"this needs the backend {name}, which is not installed; "
                        f"there are: {', '.join(known)}"
                    )
                    return origin.document.error(origin.path, problem)
        return None

    def retold(self, error: ConfigError) -> ConfigError:
        """Say an error about `data` of the line that it comes from."""
        for path in sorted(self.origins, key=len, reverse=True):
            if error.path == path or error.path.startswith((f"{path}.", f"{path}[")):
                origin, problem = self.origins[path], error.problem
                if problem.startswith("unknown key"):  # our key, which the operator never wrote
                    key = error.path.rpartition(".")[2]
                    problem = f"this needs the option {key} of a backend, which has none here"
                return origin.document.error(origin.path, problem)
        return error


class Draft:
    """A configuration of ours in the making."""

    def __init__(self) -> None:
        self.notes: list[Note] = []
        self._data: Data = {}
        self._pools: list[Data] = []
        self._origins: dict[str, Origin] = {}

    def set(self, key: str, value: object, origin: Origin) -> None:
        """Say something of the file as a whole."""
        self._data[key] = value
        self._origins[key] = origin

    def pool(
        self,
        name: str,
        gpus: Data | None,
        backends: Sequence[Data],
        origin: Origin,
        rules: Data | None = None,
    ) -> None:
        """Add a pool after the others; `gpus` of `None` selects all, and names are made unique.

        `rules` are further keys of the pool.
        """
        taken = {pool["name"] for pool in self._pools}
        unique = next(name for name in _numbered(name) if name not in taken)
        self._origins[f"pools[{len(self._pools)}]"] = origin
        self._pools.append(
            {"name": unique, "gpus": gpus or "all", "backends": list(backends), **(rules or {})}
        )

    def note(self, origin: Origin, text: str) -> None:
        """Tell the operator something of one key."""
        self.notes.append(origin.note(text))

    def converted(self) -> Converted:
        """Give what was drafted; its data can be written as YAML."""
        data = {"version": VERSION, **self._data, "pools": self._pools}
        order = sorted(self.notes, key=lambda note: (note.file, note.line, note.path))
        return Converted(data, tuple(dict.fromkeys(order)), self._origins)


def _numbered(name: str) -> Iterable[str]:
    yield name
    yield from (f"{name} ({number})" for number in range(2, 10**6))
