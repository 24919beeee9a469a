"""Node selectors and required node affinities, as the scheduler reads them."""

import re
from collections.abc import Iterable, Mapping

from metagpu.translation.values import Object


def missing_label(
    selector: Mapping[str, str], terms: Iterable[Object], name: str, labels: Mapping[str, str]
) -> str:
    """Return what a selector or affinity misses at a node, empty for nothing.

    One of the terms of the affinity has to hold, where there are any.
    """
    for key, value in selector.items():
        if labels.get(key) != value:
            return f"{key}={value}"
    terms = list(terms)
    if terms and not any(_term_holds(it, name, labels) for it in terms):
        first = terms[0].get("matchExpressions") or terms[0].get("matchFields") or ()
        return " and ".join(_described(it) for it in first) or "an affinity without a term"
    return ""


def required_terms(spec: Object) -> list[Object]:
    """Return the terms of a pod's required node affinity."""
    node_affinity = (spec.get("affinity") or {}).get("nodeAffinity") or {}
    required = node_affinity.get("requiredDuringSchedulingIgnoredDuringExecution") or {}
    return list(required.get("nodeSelectorTerms") or ())


def _term_holds(term: Object, name: str, labels: Mapping[str, str]) -> bool:
    expressions = term.get("matchExpressions") or ()
    fields = term.get("matchFields") or ()
    if not expressions and not fields:
        return False
    return all(_holds(it, labels) for it in expressions) and all(
        _holds(it, {"metadata.name": name}) for it in fields
    )


def _holds(it: Object, labels: Mapping[str, str]) -> bool:
    value, values = labels.get(it["key"]), list(it.get("values") or ())
    number, bound = _number(value), _number(values[0]) if len(values) == 1 else None
    outcomes = {
        "In": value in values,
        "NotIn": value not in values,
        "Exists": value is not None,
        "DoesNotExist": value is None,
        "Gt": number is not None and bound is not None and number > bound,
        "Lt": number is not None and bound is not None and number < bound,
    }
    return outcomes.get(it["operator"], True)


def _number(text: object) -> int | None:
    """Return the integer of a label or bound, `None` for what no 64 bits hold."""
    digits = re.fullmatch(r"([+-]?)0*([0-9]{1,19})", str(text))
    number = int("".join(digits.groups())) if digits else None
    return number if number is not None and -(2**63) <= number < 2**63 else None


def _described(it: Object) -> str:
    values = it.get("values") or ()
    listed = f" ({', '.join(values)})" if values else ""
    return f"{it['key']} {it['operator']}{listed}"
