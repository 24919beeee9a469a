"""Selectors of devices: CEL as Kubernetes evaluates it. Pure.

The library cel-expr-python parses, checks and evaluates. Here are the variable `device`, and the
functions that Kubernetes adds (docs/decisions/0002-simulator-below-pynvml.md).
"""

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from typing import Any, Final

from cel_expr_python import cel

from metagpu.sim.allocation import cel_tree, cel_values
from metagpu.sim.allocation.amounts import AllocationError
from metagpu.sim.allocation.pb.cel.expr import CheckedExpr

Device = Mapping[str, Any]
"""A device of a ResourceSlice."""

_FIELDS: Final = ("driver", "attributes", "capacity", "allowMultipleAllocations")
_HAS_FIELD: Final = re.compile(rf"\bhas\s*\(\s*device\s*\.\s*(?:{'|'.join(_FIELDS)})\s*\)")
_UNSERVED: Final = frozenset(
    {
        *("cidr", "isCIDR", "ip", "ip.isCanonical", "isIP", "containsCIDR", "containsIP"),
        *("url", "isURL", "find", "findAll", "includes", "unwrapOpt", "optional", "format"),
        *("indexOf", "lastIndexOf", "isSorted", "max", "min", "sum"),
    }
)
"""Functions that Kubernetes has and the library has not, or not for lists."""
_DIFFERENT: Final = frozenset({"format", "cel.@mapInsert", "lists.range"})
"""Functions that the library evaluates in another way."""
_UNDECLARED: Final = re.compile(
    r"(?:undeclared reference to|found no matching overload for) '([^']+)'"
)
_AROUND: Final = re.compile(r"^(?:[A-Z_]+: )+(?:<input>:[0-9:]+ )?| \[[A-Z_]+\]$")
"""What the library puts around a text: its status, and a place."""
_GROWTH: Final = {"_+_": 1, "join": 6, "replace": 6}
"""How often each function may double a text or list, roughly: Kubernetes counts costs instead."""
_MOST_GROWTH: Final = 16
_TOO_DEEP: Final = "it is nested too deep"
_ORDERS: Final = ("_<_", "_<=_", "_>_", "_>=_")
_LIBRARIES: Final = """
- name: bindings
- name: lists
- name: optional
- name: sets
- name: strings
  version: 2
- name: two-var-comprehensions
"""
_BOOL, _INT, _STRING, _DOUBLE = cel.Type.BOOL, cel.Type.INT, cel.Type.STRING, cel.Type.DOUBLE
_ANY: Final = cel.Type("google.protobuf.Any")
_QUANTITY: Final = cel.Type.AbstractType(cel_values.QUANTITY)
_SEMVER: Final = cel.Type.AbstractType(cel_values.SEMVER)


class SelectorError(AllocationError):
    """Raised for an expression that Kubernetes refuses, or that fails on a device."""


class UnknownSelectorError(AllocationError):
    """Raised for an expression of which nobody here knows what Kubernetes makes of it."""


def check_selector(expression: str) -> None:
    """Check what Kubernetes checks without a device.

    Raises:
        SelectorError: Kubernetes refuses the expression.
    """
    with suppress(UnknownSelectorError):
        _compile(expression)


def selects(expression: str, driver: str, device: Device) -> bool:
    """Return whether a selector selects a device.

    Raises:
        SelectorError: Kubernetes refuses the expression, or it fails on the device.
        UnknownSelectorError: it cannot be evaluated here.
    """
    compiled = _compile(expression)
    try:
        found = compiled.eval(data=_variables(driver, device))
    except (RuntimeError, MemoryError) as error:
        raise _unknown(expression, _plain(error)) from error
    except ValueError as error:  # of a version or a quantity of the device
        raise _failed(expression, error) from error
    if found.type() == cel.Type.ERROR:
        raise _failed(expression, _plain(found.value()))
    if found.type() != _BOOL:
        raise _failed(expression, f"it gives {found.type().name()}, not BOOL")
    return bool(found.value())


@lru_cache(maxsize=256)
def _compile(expression: str) -> cel.Expression:
    """Return a selector that can be evaluated."""
    if _HAS_FIELD.search(expression):
        raise _unknown(expression, "has() of a field of device is not evaluated")
    try:
        checked = _CHECKS.compile(expression)
        tree = cel_tree.unpack_tree(checked.serialize())
        if why := _unserved(tree):
            raise _unknown(expression, why)
        if problem := _problem(checked, tree):
            raise _refused(expression, problem)
        return _VALUES.deserialize(cel_tree.pack_tree(cel_tree.rewrite(tree)))
    except RecursionError as error:
        raise _unknown(expression, _TOO_DEEP) from error
    except RuntimeError as error:
        if "recursion" in str(error):
            raise _unknown(expression, _TOO_DEEP) from error
        if unserved := _UNSERVED.intersection(_UNDECLARED.findall(str(error))):
            raise _unknown(expression, f"{min(unserved)}() is not evaluated") from error
        raise _refused(expression, _plain(error)) from error
    except TypeError as error:  # no text that the library can take
        raise _refused(expression, "it is not valid Unicode") from error


def _unserved(tree: CheckedExpr) -> str:
    """Return what is evaluated otherwise here than by Kubernetes."""
    called = cel_tree.called(tree)
    if unserved := _DIFFERENT & called.keys():
        return f"{min(unserved)}() is not evaluated"
    if sum(_GROWTH[name] * called[name] for name in _GROWTH) > _MOST_GROWTH:
        return "its values may get too large"
    if "" in cel_tree.fields_of(tree, "device"):
        return "device as a whole is not evaluated"
    return "has() of a domain is not evaluated" if cel_tree.asks_for_a_domain(tree) else ""


def _problem(checked: cel.Expression, tree: CheckedExpr) -> str:
    """Return what Kubernetes refuses of an expression that the library takes."""
    if wrong := cel_tree.fields_of(tree, "device"):
        return f"device has no field {min(wrong)}; it has {', '.join(_FIELDS)}"
    if not (cel_tree.is_any(tree) or checked.return_type() == _BOOL):
        return f"it gives {checked.return_type().name()}, not BOOL"
    if cel_tree.mixes_types(tree):
        return "the elements of a list or map have different types"
    for function, program in _LITERALS.items():
        for text in cel_tree.literal_arguments(tree, function):
            found = program.eval(data={"text": text})
            if found.type() == cel.Type.ERROR:
                return f"{function} {text!r}: {_plain(found.value())}"
    return ""


def _refused(expression: str, why: str) -> SelectorError:
    return SelectorError(f"Kubernetes refuses the selector {expression}: {why}")


def _failed(expression: str, why: object) -> SelectorError:
    return SelectorError(f"the selector {expression} fails on a device: {why}")


def _unknown(expression: str, why: str) -> UnknownSelectorError:
    return UnknownSelectorError(f"metagpu cannot evaluate the selector {expression}: {why}")


def _plain(error: object) -> str:
    """Return the first line of the library's text, in Kubernetes' words."""
    text = _AROUND.sub("", str(error).partition("\n")[0])
    text = re.sub('^Key not found in map : "(.*)"$', r"no such key: \1", text)
    return text.replace("No matching overloads found : ", "no such overload: ")


def _variables(driver: str, device: Device) -> Mapping[str, Any]:
    variables = {
        "driver": driver,
        "allowMultipleAllocations": bool(device.get("allowMultipleAllocations")),
        "attributes": _by_domain(driver, device.get("attributes") or {}, _attribute),
        "capacity": _by_domain(driver, device.get("capacity") or {}, _capacity),
    }
    return {"device": variables} | {f"device.{name}": value for name, value in variables.items()}


def _by_domain(
    driver: str, named: Mapping[str, Any], convert: Callable[[Any], Any]
) -> Mapping[str, Mapping[str, Any]]:
    """Return values by domain and name; one without a domain is the driver's."""
    found: dict[str, dict[str, Any]] = {}
    for name, value in named.items():
        domain, _, own = name.rpartition("/")
        found.setdefault(domain or driver, {})[own] = convert(value)
    return found


def _attribute(value: Mapping[str, Any]) -> Any:  # noqa: ANN401 - a type of the user's
    [(kind, found)] = value.items()
    return cel_values.semver(found) if kind == "version" else found


def _capacity(value: Mapping[str, Any]) -> cel_values.Value:
    return cel_values.quantity(str(value["value"]))


def _comparable(one: bool, other: bool) -> bool:  # noqa: FBT001 - CEL's order
    """Return true unless the first value alone is a version or quantity."""
    if one and not other:
        raise ValueError(cel_values.MISMATCH)
    return True


class _Functions:
    """Overloads of functions, for two environments.

    The one that checks has Kubernetes' types. In the one that evaluates, quantities and versions
    are maps, and functions get their texts (`cel_tree`).
    """

    def __init__(self) -> None:
        self._checks: dict[str, dict[str, cel.Overload]] = defaultdict(dict)
        self._values: dict[str, dict[str, cel.Overload]] = defaultdict(dict)

    def add(
        self, name: str, takes: Sequence[cel.Type], gives: cel.Type, run: Callable[..., Any] | None
    ) -> None:
        """Add an overload; a method's name begins with a dot; the library may run it."""
        kinds = (*takes, gives)
        self._declare(self._checks, name, kinds, None)
        if run is not None:
            opaque = (_QUANTITY, _SEMVER)
            plain = [_STRING if kind in opaque else kind for kind in takes]
            made = cel.Type.MAP if gives in opaque else gives
            self._declare(self._values, name, (*plain, made), run)

    def environments(self) -> tuple[cel.Env, cel.Env]:
        """Return the environment that checks, and the one that evaluates."""
        orders = "".join(f'  - name: "{name}"\n' for name in _ORDERS)
        text = f"stdlib:\n  exclude_functions:\n{orders}extensions:{_LIBRARIES}"
        named = cel.Type.Map(_STRING, cel.Type.Map(_STRING, _ANY))
        amounts = cel.Type.Map(_STRING, cel.Type.Map(_STRING, _QUANTITY))
        device = {"device": cel.Type.DYN, "device.driver": _STRING}
        device |= {"device.attributes": named, "device.capacity": amounts}
        device |= {"device.allowMultipleAllocations": _BOOL}
        return (
            cel.NewEnv(
                config=cel.NewEnvConfigFromYaml(text),
                variables=device,
                functions=_listed(self._checks),
            ),
            cel.NewEnv(
                config=cel.NewEnvConfigFromYaml(f"extensions:{_LIBRARIES}"),
                variables=dict.fromkeys(device, cel.Type.DYN),
                functions=_listed(self._values),
            ),
        )

    @staticmethod
    def _declare(
        into: dict[str, dict[str, cel.Overload]],
        name: str,
        kinds: Sequence[cel.Type],
        run: Callable[..., Any] | None,
    ) -> None:
        own, takes = name.removeprefix("."), list(kinds[:-1])
        key = f"{name}({', '.join(kind.name() for kind in takes)})"
        member = own != name
        into[own][key] = cel.Overload(key, kinds[-1], takes, is_member=member, impl=run)


def _listed(overloads: Mapping[str, Mapping[str, cel.Overload]]) -> list[cel.FunctionDecl]:
    return [cel.FunctionDecl(name, list(own.values())) for name, own in overloads.items()]


def _environments() -> tuple[cel.Env, cel.Env]:
    known, numbers = _Functions(), (_INT, cel.Type.UINT, _DOUBLE)
    others = (_BOOL, _STRING, cel.Type.BYTES, cel.Type.TIMESTAMP, cel.Type.DURATION)
    pairs = [(one, other) for one in numbers for other in numbers] + [
        (kind, kind) for kind in others
    ]
    for name in _ORDERS:
        for pair in pairs:  # the library's own checks refuse `1 <= 1.5`
            known.add(name, pair, _BOOL, None)
    for kind in (_QUANTITY, _SEMVER):
        known.add(".compareTo", (kind, kind), _INT, cel_values.compare)
        known.add(
            ".isGreaterThan", (kind, kind), _BOOL, lambda *pair: cel_values.compare(*pair) > 0
        )
        known.add(".isLessThan", (kind, kind), _BOOL, lambda *pair: cel_values.compare(*pair) < 0)
    for read, kind in ((cel_values.quantity, _QUANTITY), (cel_values.semver, _SEMVER)):
        for takes in ((_STRING,), (_STRING, _BOOL))[: 1 + (kind == _SEMVER)]:
            name = read.__name__
            known.add(name, takes, kind, read)
            known.add(f"is{name.capitalize()}", takes, _BOOL, partial(cel_values.is_valid, read))
    known.add("sign", (_QUANTITY,), _INT, cel_values.sign)
    known.add(".isInteger", (_QUANTITY,), _BOOL, cel_values.is_integer)
    known.add(".asInteger", (_QUANTITY,), _INT, cel_values.as_integer)
    known.add(".asApproximateFloat", (_QUANTITY,), _DOUBLE, cel_values.as_float)
    for other in (_QUANTITY, _INT):
        known.add(".add", (_QUANTITY, other), _QUANTITY, cel_values.add)
        known.add(".sub", (_QUANTITY, other), _QUANTITY, cel_values.subtract)
    for place, name in enumerate((".major", ".minor", ".patch")):
        known.add(name, (_SEMVER,), _INT, cel_values.number_of(place))
    known.add(cel_tree.COMPARABLE, (_BOOL, _BOOL), _BOOL, _comparable)
    return known.environments()


_CHECKS, _VALUES = _environments()
_LITERALS: Final = {
    function: cel.NewEnv(variables={"text": _STRING}).compile(call)
    for function, call in (
        ("matches", "''.matches(text)"),
        ("duration", "duration(text)"),
        ("timestamp", "timestamp(text)"),
    )
}
"""Functions whose literal arguments Kubernetes checks with the syntax."""
