"""Selectors of devices in the part of CEL that claims of GPUs use. Pure.

CEL's expressions are read by Python's own parser, for the grammar of both is the same but for the
names of the logical operators (docs/decisions/0002-simulator-below-pynvml.md). Not read:
macros but `has`, the ternary operator, and strings with CEL's own escapes.
"""

import ast
import operator
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import lru_cache
from typing import Any, Final

from metagpu.sim.allocation.amounts import AllocationError, parse_amount

_TOKENS: Final = re.compile(r"""r?'[^'\\\n]*'|r?"[^"\\\n]*"|&&|\|\||!(?!=)|\.?\b[A-Za-z_]\w*|\s+""")
_NAMES: Final = {"&&": " and ", "||": " or ", "!": "~"} | {
    name: name.capitalize().replace("Null", "None") for name in ("true", "false", "null")
}
_COMPARISONS: Final[Mapping[type[ast.cmpop], Callable[[Any, Any], Any]]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_VERSION: Final = re.compile(r"(\d+)\.(\d+)\.(\d+)")

Device = Mapping[str, Any]
"""A device of a ResourceSlice."""


class _MissingKeyError(AllocationError):
    """Raised for a name that a device lacks."""


class _Ordered:
    """A Quantity or a version: values that CEL compares by methods."""

    def __init__(self, value: Any) -> None:  # noqa: ANN401 - anything with an order
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Ordered) and bool(self.value == other.value)

    def __hash__(self) -> int:
        return hash(self.value)


def _compare(one: _Ordered, other: _Ordered) -> int:
    return int(one.value > other.value) - int(one.value < other.value)


_METHODS: Final[Mapping[tuple[type, str], Callable[..., Any]]] = {
    (_Ordered, "compareTo"): _compare,
    (_Ordered, "isGreaterThan"): lambda one, other: _compare(one, other) > 0,
    (_Ordered, "isLessThan"): lambda one, other: _compare(one, other) < 0,
    (str, "matches"): lambda text, pattern: re.search(pattern, text) is not None,
    (str, "startsWith"): str.startswith,
    (str, "endsWith"): str.endswith,
    (str, "contains"): lambda text, part: part in text,
    (str, "lowerAscii"): str.lower,
    (str, "upperAscii"): str.upper,
    (str, "size"): len,
}


def _version(text: str) -> _Ordered:
    found = _VERSION.match(text)
    if found is None:
        raise AllocationError(f"{text!r} is not a version")
    return _Ordered(tuple(map(int, found.groups())))


_FUNCTIONS: Final[Mapping[str, Callable[[Any], Any]]] = {
    "quantity": lambda text: _Ordered(parse_amount(text)),
    "semver": _version,
    "size": len,
}


def selects(expression: str, driver: str, device: Device) -> bool:
    """Return whether a selector selects a device.

    Raises:
        AllocationError: the expression is not read here, or names what the device lacks.
    """
    try:
        found = _Evaluation(_variables(driver, device)).value(_parse(expression))
    except RecursionError as error:
        raise _unread(expression) from error
    if not isinstance(found, bool):
        raise AllocationError(f"the selector {expression!r} is not a condition")
    return found


@lru_cache(maxsize=256)
def _parse(expression: str) -> ast.expr:
    text = _TOKENS.sub(lambda found: _python_token(found[0]), expression)
    try:
        return ast.parse(f"({text})", mode="eval").body
    except (SyntaxError, ValueError, MemoryError) as error:  # the last: nested too deep
        raise _unread(expression) from error


def _python_token(token: str) -> str:
    return " " if token.isspace() else _NAMES.get(token, token)


def _unread(expression: str) -> AllocationError:
    return AllocationError(f"the simulator does not read the selector {expression!r}")


def _variables(driver: str, device: Device) -> Mapping[str, Any]:
    return {
        "driver": driver,
        "allowMultipleAllocations": bool(device.get("allowMultipleAllocations")),
        "attributes": _by_domain(driver, device.get("attributes") or {}, _attribute),
        "capacity": _by_domain(driver, device.get("capacity") or {}, _capacity),
    }


def _by_domain(driver: str, named: Mapping[str, Any], convert: Callable[[Any], Any]) -> "_Domains":
    """Return values by domain and name; one without a domain is the driver's."""
    found = _Domains()
    for name, value in named.items():
        domain, _, own = name.rpartition("/")
        found.setdefault(domain or driver, {})[own] = convert(value)
    return found


class _Domains(dict[str, dict[str, Any]]):
    """Names by domain; an unknown domain has none."""

    def __missing__(self, _: str) -> dict[str, Any]:
        return {}


def _attribute(value: Mapping[str, Any]) -> Any:  # noqa: ANN401 - a type of the user's
    [(kind, it)] = value.items()
    return _version(it) if kind == "version" else it


def _capacity(value: Mapping[str, Any]) -> Any:  # noqa: ANN401 - as above
    return _Ordered(Fraction(parse_amount(value["value"])))


class _Evaluation:
    """One evaluation of an expression for a device."""

    def __init__(self, variables: Mapping[str, Any]) -> None:
        self._variables = variables

    def value(self, it: ast.expr) -> Any:  # noqa: ANN401 - as the expression says
        """Return the value of an expression."""
        match it:
            case ast.Constant(value=value):
                found: Any = value
            case ast.Name(id="device"):
                found = self._variables
            case ast.List(elts=elements):
                found = [self.value(each) for each in elements]
            case ast.Attribute(value=of, attr=name):
                found = _member(self.value(of), name)
            case ast.Subscript(value=of, slice=key):
                found = _member(self.value(of), self.value(key))
            case ast.Call(func=function, args=arguments, keywords=[]):
                found = self._call(function, arguments)
            case _:
                found = self._operation(it)
        return found

    def _operation(self, it: ast.expr) -> bool:
        match it:
            case ast.UnaryOp(op=ast.Invert(), operand=operand):
                return not self._condition(operand)
            case ast.BoolOp(op=joined, values=values):
                return self._joined(values, ends=isinstance(joined, ast.Or))
            case ast.Compare(left=left, ops=[comparison], comparators=[right]):
                return _compared(comparison, self.value(left), self.value(right))
        raise _unread(ast.unparse(it))

    def _condition(self, it: ast.expr) -> bool:
        found = self.value(it)
        if not isinstance(found, bool):
            raise AllocationError(f"{ast.unparse(it)!r} is not a condition")
        return found

    def _joined(self, values: list[ast.expr], *, ends: bool) -> bool:
        """Join conditions; one that decides counts also beside errors, as CEL has it."""
        error: AllocationError | None = None
        for each in values:
            try:
                if self._condition(each) == ends:
                    return ends
            except AllocationError as problem:
                error = error or problem
        if error is not None:
            raise error
        return not ends

    def _call(self, function: ast.expr, arguments: list[ast.expr]) -> Any:  # noqa: ANN401 - as said
        match function, arguments:
            case ast.Name(id="has"), [ast.Attribute(value=of, attr=name)]:
                return name in _mapping(self.value(of), name)
            case ast.Name(id=name), [argument] if name in _FUNCTIONS:
                return _applied(_FUNCTIONS[name], self.value(argument), [])
            case ast.Attribute(value=of, attr=name), _:
                receiver = self.value(of)
                method = _METHODS.get((type(receiver), name))
                if method is not None:
                    return _applied(method, receiver, [self.value(it) for it in arguments])
        raise _unread(ast.unparse(ast.Call(function, arguments, [])))


def _applied(method: Callable[..., Any], receiver: Any, values: list[Any]) -> Any:  # noqa: ANN401
    try:
        return method(receiver, *values)
    except (TypeError, AttributeError, re.error) as error:
        raise AllocationError(f"a call in a selector cannot be made: {error}") from error


def _member(of: Any, name: Any) -> Any:  # noqa: ANN401 - as the expression says
    try:
        return _mapping(of, name)[name]
    except (KeyError, TypeError):  # a list is no key
        raise _MissingKeyError(f"no such key: {name}") from None


def _mapping(of: Any, name: Any) -> Mapping[Any, Any]:  # noqa: ANN401 - as the expression says
    if not isinstance(of, Mapping):
        raise AllocationError(f"no such key: {name}")
    return of


def _compared(comparison: ast.cmpop, one: Any, other: Any) -> bool:  # noqa: ANN401 - as above
    if isinstance(comparison, ast.Eq | ast.NotEq):
        equal = isinstance(one, bool) == isinstance(other, bool) and one == other
        return bool(equal) == isinstance(comparison, ast.Eq)
    try:
        if isinstance(comparison, ast.In):
            return one in other
        return bool(_COMPARISONS[type(comparison)](one, other))
    except (KeyError, TypeError) as error:
        raise AllocationError("no such overload: a comparison of different kinds") from error
