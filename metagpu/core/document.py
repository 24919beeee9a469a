"""YAML into typed values, with errors that name the file, the line and the path.

A `Document` remembers where each value stands, so that any later check can complain in the same
words: `FILE: LINE: PATH: what is wrong, what is allowed`.
"""

from collections.abc import Iterable, Iterator
from typing import Any, Final, TypeVar

import msgspec
import yaml

from metagpu.core.errors import ConfigError
from metagpu.core.paths import joined, steps, value_at
from metagpu.core.units import decode_unit

ValueT = TypeVar("ValueT")

_MOST_VALUES: Final = 100_000
"""Values of a document, each alias counted as what it stands for: some lines of aliases of aliases
stand for thousands of millions, and whoever may write a ConfigMap must not stop a node's daemon."""
_MENDS: Final = {
    "found character '\\t' that cannot start any token": "indent with spaces, not with tabs",
    "found another document": "keep one document in a file, without `---` between",
}
"""What to do about a problem that PyYAML names, where its words alone do not say it."""


class Document:
    """One YAML (or JSON) file, parsed.

    Attributes:
        file: what messages call it.
        data: its plain value.

    Args:
        text: what it says.
        file: what messages call it.
        first_line: the line of `file` at which `text` begins, when it is a part of it; 0 for a
            text of one line, of which nobody has to be told the line.

    Raises:
        ConfigError: if it is no YAML, holds itself or too much, or a key stands twice in one
            mapping.
    """

    def __init__(self, text: str, file: str, first_line: int = 1) -> None:
        self.file = file
        self._above = first_line - 1

        try:
            # libyaml's loader is faster, and ends the process when lists are nested deeply.
            self._root: yaml.Node | None = yaml.compose(text, Loader=yaml.SafeLoader)
            if (values := _weight(self._root, {})) > _MOST_VALUES:
                raise ConfigError(
                    f"no usable YAML: it has {values} values, those that aliases stand for "
                    f"included; allowed: {_MOST_VALUES} at most",
                    file=file,
                )
            self.data: Any = yaml.safe_load(text)
            repeated = list(_repeated(self._root))
        except yaml.MarkedYAMLError as error:
            line = self._above + error.problem_mark.line + 1 if error.problem_mark else 0
            told = str(error.problem).removeprefix("but ")
            mend = _MENDS.get(told)
            problem = f"{told}; {mend}" if mend else told
            raise ConfigError(f"no valid YAML: {problem}", file=file, line=line) from error
        except RecursionError:
            problem = "no usable YAML: a value holds itself, or too many others in each other"
            raise ConfigError(problem, file=file) from None
        except (yaml.YAMLError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            # PyYAML lets the errors of its types through: of a date of February 31st, for one.
            problem = " ".join(str(error).split())
            raise ConfigError(f"no valid YAML: {problem}", file=file) from error

        for key, first, again in repeated:
            raise ConfigError(
                f"the key stands twice, first in line {self._above + first}; keep one of them",
                file=file,
                line=self._above + again,
                path=key,
            )

    def error(self, path: str, problem: str) -> ConfigError:
        """Make the error for a problem with the value at `path`, or as near to it as exists."""
        return ConfigError(problem, file=self.file, line=self.line(path), path=path)

    def at(self, path: str) -> Any:  # noqa: ANN401 - YAML holds anything
        """Give the plain value at a path such as `pools[0].backends[1]`."""
        return value_at(self.data, path)

    def decode(self, wanted: type[ValueT], path: str = "") -> ValueT:
        """Give the value at `path` as a `wanted`.

        Raises:
            ConfigError: if it does not fit; unknown keys come with those that are known.
        """
        value = self.at(path)

        try:
            return msgspec.convert(value, wanted, dec_hook=decode_unit)
        except msgspec.ValidationError as error:
            from metagpu.core.misfit import misfit  # noqa: PLC0415 - a good file does without it

            place, problem = misfit(value, wanted, str(error))
            raise self.error(joined(path, place), problem) from None

    def line(self, path: str) -> int:
        """Tell the line of the value at `path`, or of what is as near to it as exists."""
        node, line = self._root, self._root.start_mark.line + 1 if self._root else 0

        for step in steps(path):
            found = _child(node, step)
            if found is None:
                break
            node, line = found
        return self._above + line if line else 0


def _child(node: yaml.Node | None, step: int | str) -> tuple[yaml.Node, int] | None:
    """Find the value node under a key or index, and the line a person would look at."""
    if isinstance(node, yaml.MappingNode) and isinstance(step, str):
        for name, value in node.value:
            if name.value == step:
                return value, name.start_mark.line + 1
    elif isinstance(node, yaml.SequenceNode) and isinstance(step, int) and step < len(node.value):
        value = node.value[step]
        return value, value.start_mark.line + 1
    return None


def _weight(node: yaml.Node | None, known: dict[yaml.Node, int]) -> int:
    """Count the values of a node as if each alias were written out, without doing so."""
    if node is None:
        return 0
    if node not in known:
        inner: Iterable[yaml.Node] = ()
        if isinstance(node, yaml.MappingNode):
            inner = (part for pair in node.value for part in pair)
        elif isinstance(node, yaml.SequenceNode):
            inner = node.value
        known[node] = 1 + sum(_weight(part, known) for part in inner)
    return known[node]


def _repeated(node: yaml.Node | None, path: str = "") -> Iterator[tuple[str, int, int]]:
    """Find keys that stand twice in one mapping; PyYAML would silently keep the last."""
    if isinstance(node, yaml.MappingNode):
        seen: dict[str, int] = {}
        for name, value in node.value:
            here = f"{path}.{name.value}".removeprefix(".")
            if name.value in seen:
                yield here, seen[name.value], name.start_mark.line + 1
            seen[str(name.value)] = name.start_mark.line + 1
            yield from _repeated(value, here)
    elif isinstance(node, yaml.SequenceNode):
        for number, value in enumerate(node.value):
            yield from _repeated(value, f"{path}[{number}]")
