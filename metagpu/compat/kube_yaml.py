"""YAML as kubectl and NVIDIA's programs read it, by Go's sigs.k8s.io/yaml.

PyYAML's YAML 1.1 takes `5:30` for a number and `2026-01-01` for a date, and `y` for a text; there
the first two are text, and `y` is true. Values go through JSON: `4.0` is 4. A text that kubectl
would take for something else is quoted.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import yaml

_TAG: Final = "tag:yaml.org,2002:"
_NOT_OF_GO: Final = frozenset(_TAG + tag for tag in ("bool", "int", "float", "timestamp", "value"))
_BOOL: Final = re.compile(
    r"(y|Y|yes|Yes|YES|on|On|ON|n|N|no|No|NO|off|Off|OFF|true|True|TRUE|false|False|FALSE)$"
)
_INT: Final = re.compile(r"[-+]?(0b[01_]+|0x[0-9a-fA-F_]+|0o[0-7_]+|0[0-7_]*|[1-9][0-9_]*)$")
_FLOAT: Final = re.compile(
    r"([-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?"
    r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN))$"
)
_TEXT_TO_QUOTE: Final = re.compile(r"[yYnN]$|[-+.0-9]")


_LONGEST: Final = 100
"""Characters of a number; Python refuses some thousands."""
_IN_FULL: Final = 1e21
"""Go's JSON writes floats below it without an exponent."""


class _OfGo(yaml.constructor.SafeConstructor, yaml.resolver.Resolver):
    """Knows Go's booleans and numbers, and no times; keys are text, as in JSON.

    A value that contains itself is an error.
    """

    yaml_implicit_resolvers = {  # noqa: RUF012 - as PyYAML has it
        first: [resolver for resolver in known if resolver[0] not in _NOT_OF_GO]
        for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_number(self, node: yaml.ScalarNode) -> int | float | str:
        """Return a number; one that is too large for Go is a text."""
        text = str(self.construct_scalar(node))
        if len(text) > _LONGEST:
            raise yaml.constructor.ConstructorError(
                None, None, "a number has too many digits", node.start_mark
            )
        plain = text.replace("_", "").lower()
        try:
            if (found := _whole(plain)) is not None and -(2**63) <= found < 2**64:
                return found
            value = float(plain.replace(".inf", "inf").replace(".nan", "nan"))
        except ValueError:
            if _INT.match(text) is None:
                raise  # a tag says that it is a number
            return text  # as `0x_`
        if math.isinf(value) and "inf" not in plain:
            return text
        return int(value) if abs(value) < _IN_FULL and value.is_integer() else value

    def construct_document(self, node: yaml.Node) -> Any:  # noqa: ANN401 - YAML holds anything
        self.deep_construct = True  # otherwise PyYAML completes values after those around them
        return super().construct_document(node)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:  # noqa: FBT001, FBT002 - PyYAML's
        self.flatten_mapping(node)
        for place, (key, value) in enumerate(node.value):
            if isinstance(found := self.construct_object(key, deep=True), int | float):
                text = json.dumps(found).removesuffix(".0") if math.isfinite(found) else key.value
                node.value[place] = (yaml.ScalarNode(f"{_TAG}str", text, key.start_mark), value)
        return super().construct_mapping(node, deep)


def _whole(plain: str) -> int | None:
    """Return a whole number as Go's `ParseInt` reads it, `None` for another text."""
    if _INT.match(plain) is None:
        return None
    digits = plain.lstrip("+-")
    return int(plain, 8 if digits.isdigit() and digits.startswith("0") else 0)


_TRUTHS: Final = {"y": True, "n": False, **yaml.constructor.SafeConstructor.bool_values}


def _truth(_: _OfGo, node: yaml.ScalarNode) -> bool:
    return _TRUTHS[str(node.value).lower()]


_OfGo.add_implicit_resolver(f"{_TAG}bool", _BOOL, list("yYnNtTfFoO"))
_OfGo.add_implicit_resolver(f"{_TAG}int", _INT, list("-+0123456789"))
_OfGo.add_implicit_resolver(f"{_TAG}float", _FLOAT, list("-+.0123456789"))
_OfGo.add_constructor(f"{_TAG}int", _OfGo.construct_number)  # type: ignore[type-var]
_OfGo.add_constructor(f"{_TAG}float", _OfGo.construct_number)  # type: ignore[type-var]
_OfGo.add_constructor(f"{_TAG}bool", _truth)  # type: ignore[type-var]


class _Loader(_OfGo, yaml.SafeLoader):
    """Words mistakes in manifests better than libyaml does."""


class GoLoader(_OfGo, getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """By libyaml, where PyYAML has it: for configuration files."""


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
