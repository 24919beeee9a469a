"""Syntax trees of CEL, judged and rewritten as Kubernetes evaluates them. Pure.

Where the library evaluates otherwise than Kubernetes, its checked tree is rewritten:

- A domain without attributes is an empty map.
- Functions of versions and quantities get the text in their map: the library would crash on a map
  of the user's with an optional value.
- A version or quantity equals no other type, comparing them fails: `@comparable` is asked first.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final

from metagpu.sim.allocation.cel_values import VALUE
from metagpu.sim.allocation.pb.cel.expr import (
    CheckedExpr,
    Constant,
    Expr,
    ExprCall,
    ExprCreateStruct,
    Packed,
    ParsedExpr,
    Type,
)

COMPARABLE: Final = "@comparable"
"""A function of two conditions, whether a value is a map: true, or an error for the first alone."""

_ANY: Final = 1
_INDEX: Final = "_[_]"
_OF_VALUES: Final = frozenset(
    {
        *("add", "asApproximateFloat", "asInteger", "compareTo", "isGreaterThan", "isInteger"),
        *("isLessThan", "major", "minor", "patch", "sign", "sub"),
    }
)
"""The functions of versions and quantities: the library gives them texts alone."""
_SUMS: Final = frozenset({"add", "sub"})
_COMPARING: Final = frozenset({"_==_", "@in"})
_LOOKUPS: Final = frozenset({_INDEX, "_?._", "_[?_]"})
_PARSED: Final = "type.googleapis.com/cel.expr.ParsedExpr"


def unpack_tree(serialized: bytes) -> CheckedExpr:
    """Return a checked tree from what the library serializes."""
    return CheckedExpr.parse(Packed.parse(serialized).value)


def pack_tree(root: Expr | None) -> bytes:
    """Return a tree as the library reads it, without static types."""
    return bytes(Packed(type_url=_PARSED, value=bytes(ParsedExpr(expr=root))))


def walk(root: Expr | None) -> Iterator[Expr]:
    """Yield the nodes of a tree, a node before its children."""
    waiting = [root]
    while waiting:
        if (node := waiting.pop()) is not None:
            yield node
            waiting.extend(_children(node))


def is_any(tree: CheckedExpr) -> bool:
    """Return whether the value is an attribute, of a type that the device decides."""
    found = tree.type_map.get(tree.expr.id) if tree.expr is not None else None
    return found is not None and found.well_known == _ANY


def called(tree: CheckedExpr) -> Counter[str]:
    """Count the functions and operators of a tree by their names."""
    calls = (each.call_expr for each in walk(tree.expr))
    return Counter(call.function for call in calls if call is not None)


def fields_of(tree: CheckedExpr, variable: str) -> frozenset[str]:
    """Return the fields that are selected of a variable, `""` for the whole."""
    selects = [each.select_expr for each in walk(tree.expr) if each.select_expr is not None]
    fields = {id(each.operand): each.field for each in selects if not each.test_only}
    return frozenset(
        fields.get(id(each), "")
        for each in walk(tree.expr)
        if each.ident_expr is not None and each.ident_expr.name == variable
    )


def asks_for_a_domain(tree: CheckedExpr) -> bool:
    """Return whether a tree has `has()` of all attributes or capacities."""
    selects = (each.select_expr for each in walk(tree.expr))
    return any(
        each is not None and each.test_only and _is_outer(each.operand, tree) for each in selects
    )


def mixes_types(tree: CheckedExpr) -> bool:
    """Return whether a literal list or map has elements of several types."""
    groups = (_element_types(each, tree) for node in walk(tree.expr) for each in _literals(node))
    return any(len(set(map(bytes, each))) > 1 for each in groups)


def literal_arguments(tree: CheckedExpr, function: str) -> Iterator[str]:
    """Yield the literal texts that are the last argument of a function."""
    for node in walk(tree.expr):
        call = node.call_expr
        if call is not None and call.function == function and call.args:
            constant = call.args[-1].const_expr
            if constant is not None and constant.string_value is not None:
                yield constant.string_value


def rewrite(tree: CheckedExpr) -> Expr | None:
    """Rewrite a checked tree for the evaluation, in place; return its root."""
    for node in list(walk(tree.expr)):
        if (changed := _rewritten(node, tree)) is not None:
            node.select_expr, node.call_expr = None, changed
    return tree.expr


def _rewritten(node: Expr, tree: CheckedExpr) -> ExprCall | None:
    """Return what takes the place of a node, `None` if it stays."""
    call, select = node.call_expr, node.select_expr
    if select is not None and _is_outer(select.operand, tree):
        return _domain(select.operand, Expr(const_expr=Constant(string_value=select.field)))
    if call is None:
        return None
    if call.function in _LOOKUPS and _is_outer(call.args[0], tree):
        found = _domain(*call.args)
        return found if call.function == _INDEX else _call("optional.of", Expr(call_expr=found))
    if call.function in _OF_VALUES:
        numbers = call.function in _SUMS  # an attribute in a sum is a number
        arguments = [_text(each, tree, is_known=numbers) for each in call.args]
        target = None if call.target is None else _text(call.target, tree)
        return ExprCall(target=target, function=call.function, args=arguments)
    if _may_mismatch(call, [tree.type_map.get(each.id) for each in call.args]):
        checked = Expr(call_expr=_call(COMPARABLE, *map(_is_map, call.args)))
        return _call("_?_:_", checked, Expr(call_expr=call), checked)
    return None


def _domain(found: Expr | None, key: Expr) -> ExprCall:
    """Return a look-up that finds an empty map where the key is missing."""
    known, value = _call("@in", key, found), _call(_INDEX, found, key)
    empty = Expr(struct_expr=ExprCreateStruct())
    return _call("_?_:_", Expr(call_expr=known), Expr(call_expr=value), empty)


def _text(node: Expr, tree: CheckedExpr, *, is_known: bool = False) -> Expr:
    """Return the text of a version or quantity, other values as they are."""
    found = tree.type_map.get(node.id)
    own = found is not None and found.abstract_type is not None
    if not own and (is_known or not _is_open(found)):
        return node
    return Expr(call_expr=_call(_INDEX, node, Expr(const_expr=Constant(string_value=VALUE))))


def _may_mismatch(call: ExprCall, types: Sequence[Type | None]) -> bool:
    """Return whether Kubernetes fails for a version and a value of another type.

    So does `==`, where the version is on the left and no null on the right; and `in`, for a list
    of literals.
    """
    if call.function not in _COMPARING:
        return False
    left, right = types
    if call.function == "@in":
        listed = call.args[1].list_expr
        elements = [] if listed is None else listed.elements
        literal = bool(elements) and all(each.const_expr is not None for each in elements)
        return literal and _is_open(left)
    own = left is not None and left.abstract_type is not None
    with_null = right is not None and right.null is not None
    return (_is_open(left) or own) and not with_null


def _call(function: str, *arguments: Expr | None) -> ExprCall:
    return ExprCall(function=function, args=[each for each in arguments if each is not None])


def _is_map(node: Expr) -> Expr:
    types = (
        Expr(call_expr=_call("type", each)) for each in (node, Expr(struct_expr=ExprCreateStruct()))
    )
    return Expr(call_expr=_call("_==_", *types))


def _children(node: Expr) -> Iterator[Expr | None]:
    if node.select_expr is not None:
        yield node.select_expr.operand
    if (call := node.call_expr) is not None:
        yield call.target
        yield from call.args
    if (loop := node.comprehension_expr) is not None:
        yield from (loop.iter_range, loop.accu_init, loop.loop_condition)
        yield from (loop.loop_step, loop.result)
    for elements in _literals(node):
        yield from elements


def _literals(node: Expr) -> Iterator[Sequence[Expr | None]]:
    """Yield the elements of a literal: of a list; the keys and the values of a map."""
    if node.list_expr is not None:
        yield node.list_expr.elements
    if node.struct_expr is not None:
        yield [each.map_key for each in node.struct_expr.entries]
        yield [each.value for each in node.struct_expr.entries]


def _element_types(elements: Sequence[Expr | None], tree: CheckedExpr) -> Iterator[Type]:
    """Yield the types of elements.

    One like `[]` takes the type of the others; one that `?` makes optional has that of its value.
    """
    for found in (tree.type_map.get(each.id) for each in elements if each is not None):
        if found is not None:
            held = found.abstract_type.parameter_types if found.abstract_type is not None else ()
            yield from (each for each in held or (found,) if _is_open(each) or not _has_dyn(each))


def _has_dyn(found: Type | None) -> bool:
    """Return whether a type, or a part of it, may be any, as of the elements of `[]`."""
    if found is None:
        return False
    element = None if found.list_type is None else found.list_type.elem_type
    return found.dyn is not None or any(map(_has_dyn, (element, *_of_map(found))))


def _of_map(found: Type | None) -> tuple[Type | None, Type | None]:
    """Return the types of the keys and of the values of a map."""
    if found is None or found.map_type is None:
        return None, None
    return found.map_type.key_type, found.map_type.value_type


def _is_open(found: Type | None) -> bool:
    return found is not None and (found.dyn is not None or found.well_known == _ANY)


def _is_outer(node: Expr | None, tree: CheckedExpr) -> bool:
    """Return whether a node has the type of all attributes, or of all capacities."""
    _, inner = _of_map(tree.type_map.get(node.id) if node is not None else None)
    _, value = _of_map(inner)
    return value is not None and (value.well_known == _ANY or value.abstract_type is not None)
