"""Node selectors, node affinities and tolerations, as the scheduler reads them."""

import re
from collections.abc import Iterable, Mapping
from typing import Final

from metagpu.translation.values import Object

_MOST_NAMED: Final = 10
"""Values of an expression that a sentence lists."""


class NodeSelection:
    """A pod's node selector and required node affinity, read once for all nodes.

    One of the terms of the affinity has to hold, where there are any.
    """

    def __init__(self, selector: Mapping[str, str], terms: Iterable[Object]) -> None:
        self._selector = selector
        self._terms = [_RequiredTerm(term) for term in terms]

    def missing(self, name: str, labels: Mapping[str, str]) -> str:
        """Return what the selection misses at a node, empty for nothing."""
        for key, value in self._selector.items():
            if labels.get(key) != value:
                return f"{key}={value}"
        if self._terms and not any(term.holds(name, labels) for term in self._terms):
            return self._terms[0].text
        return ""


def required_terms(spec: Object) -> list[Object]:
    """Return the terms of a pod's required node affinity."""
    node_affinity = (spec.get("affinity") or {}).get("nodeAffinity") or {}
    required = node_affinity.get("requiredDuringSchedulingIgnoredDuringExecution") or {}
    return list(required.get("nodeSelectorTerms") or ())


def tolerates(tolerations: Iterable[Object], taint: Object) -> bool:
    """Return whether one of some tolerations tolerates a taint."""
    return any(
        toleration.get("effect") in (None, "", taint.get("effect"))
        and (
            (
                toleration.get("operator") == "Exists"
                and toleration.get("key") in (None, "", taint["key"])
            )
            or (
                toleration.get("key") == taint["key"]
                and (toleration.get("value") or "") == taint.get("value", "")
            )
        )
        for toleration in tolerations
    )


class _RequiredTerm:
    """A term: all its expressions have to hold, and an empty one never does."""

    def __init__(self, term: Object) -> None:
        expressions, fields = term.get("matchExpressions") or (), term.get("matchFields") or ()
        self._expressions = [_LabelRule(expression) for expression in expressions]
        self._fields = [_LabelRule(field) for field in fields]
        first = self._expressions or self._fields
        self.text = " and ".join(each.text for each in first) or "an affinity without a term"

    def holds(self, name: str, labels: Mapping[str, str]) -> bool:
        if not self._expressions and not self._fields:
            return False
        named = {"metadata.name": name} if self._fields else {}
        return all(each.holds(labels) for each in self._expressions) and all(
            each.holds(named) for each in self._fields
        )


class _LabelRule:
    """An expression, judged once for each value that nodes have of its label."""

    def __init__(self, expression: Object) -> None:
        self._key, self._operator = expression["key"], expression["operator"]
        values = list(expression.get("values") or ())
        self._values = frozenset(values)
        self._bound = _number(values[0]) if len(values) == 1 else None
        self._judged: dict[str | None, bool] = {}
        named = values[:_MOST_NAMED]
        if more := len(values) - len(named):
            named.append(f"{more} more")
        listed = f" ({', '.join(named)})" if named else ""
        self.text = f"{self._key} {self._operator}{listed}"

    def holds(self, labels: Mapping[str, str]) -> bool:
        value = labels.get(self._key)
        if (known := self._judged.get(value)) is None:
            known = self._judged[value] = self._holds_for(value)
        return known

    def _holds_for(self, value: str | None) -> bool:
        if self._operator in {"Gt", "Lt"}:
            number, bound = _number(value), self._bound
            if number is None or bound is None:
                return False
            return number > bound if self._operator == "Gt" else number < bound
        outcomes = {
            "In": value in self._values,
            "NotIn": value not in self._values,
            "Exists": value is not None,
            "DoesNotExist": value is None,
        }
        return outcomes.get(self._operator, True)


def _number(text: object) -> int | None:
    """Return the integer of a label or bound, `None` for what no 64 bits hold."""
    digits = re.fullmatch(r"([+-]?)0*([0-9]{1,19})", str(text))
    number = int("".join(digits.groups())) if digits else None
    return number if number is not None and -(2**63) <= number < 2**63 else None
