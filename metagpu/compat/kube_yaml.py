"""YAML as kubectl reads and writes it.

PyYAML's YAML 1.1 takes `5:30` for a number and `2026-01-01` for a date; in a manifest both are
text. A text that kubectl would take for something else is quoted.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import yaml

_TAG: Final = "tag:yaml.org,2002:"
_NOT_KUBECTLS: Final = frozenset(_TAG + tag for tag in ("int", "float", "timestamp", "value"))
_INT: Final = re.compile(r"[-+]?(0b[01_]+|0x[0-9a-fA-F_]+|0o?[0-7_]*|[1-9][0-9_]*)$")
_FLOAT: Final = re.compile(
    r"([-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?"
    r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN))$"
)
_TEXT_TO_QUOTE: Final = re.compile(r"[yYnN]$|[-+.0-9]")


class _Loader(yaml.SafeLoader):
    """Knows the numbers that kubectl knows, and no times; keys are text, as in JSON.

    A value that contains itself is an error.
    """

    yaml_implicit_resolvers = {  # noqa: RUF012 - as PyYAML has it
        first: [resolver for resolver in known if resolver[0] not in _NOT_KUBECTLS]
        for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_document(self, node: yaml.Node) -> Any:  # noqa: ANN401 - YAML holds anything
        self.deep_construct = True  # otherwise PyYAML completes values after those around them
        return super().construct_document(node)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:  # noqa: FBT001, FBT002 - PyYAML's
        self.flatten_mapping(node)
        for place, (key, value) in enumerate(node.value):
            if isinstance(found := self.construct_object(key, deep=True), int | float):
                text = json.dumps(found).removesuffix(".0")
                node.value[place] = (yaml.ScalarNode(f"{_TAG}str", text, key.start_mark), value)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(f"{_TAG}int", _INT, list("-+0123456789"))
_Loader.add_implicit_resolver(f"{_TAG}float", _FLOAT, list("-+.0123456789"))


class _Dumper(yaml.SafeDumper):
    """Quotes what begins as a number does."""


_Dumper.add_implicit_resolver("!quoted", _TEXT_TO_QUOTE, list("yYnN-+.0123456789"))


def load_documents(text: str) -> Iterator[tuple[Any, yaml.Node]]:
    """Yield the documents of a manifest, each with its node, which has its lines.

    Raises:
        yaml.YAMLError: the text is no YAML.
    """
    loader = _Loader(text)
    try:
        while loader.check_node() and (node := loader.get_node()) is not None:
            yield loader.construct_document(node), node
    finally:
        loader.dispose()


def items_of(node: yaml.Node | None) -> Sequence[yaml.Node]:
    """Return the nodes below the key `items` of a list's node, none for another node."""
    pairs = node.value if isinstance(node, yaml.MappingNode) else ()
    found = [value for key, value in pairs if key.value == "items"]
    return found[-1].value if found and isinstance(found[-1], yaml.SequenceNode) else ()


def dump_document(document: Mapping[str, Any]) -> str:
    """Return a document of a manifest."""
    found: str = yaml.dump(document, Dumper=_Dumper, sort_keys=False)
    return found
