"""Plant small faults, one at a time, and report which of them the tests of their folder catch.

The tests of the module's own folder run in a copy of the tree until the first failure, those that
bear its name first, then those that import it. A survivor is the same program in other words, or a
test is missing.
"""

import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Iterator, Sequence
from copy import deepcopy
from itertools import accumulate
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).parents[2]
ROOMS: Final = (
    "core/availability", "core/state", "core/health", "core/usage",
    "plugins/kubelet", "plugins/dra", "backends", "agent/exchange",
)  # fmt: skip
"""Where faults hurt: folders and modules below `metagpu/`."""
_FLIPPED: Final[dict[type[ast.cmpop], type[ast.cmpop]]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip


class Fault(NamedTuple):
    """A change of one place of a module, which makes `text` of it."""

    room: str
    file: str
    line: int
    old: str
    new: str
    text: str

    def __str__(self) -> str:
        old, new = (" ".join(part.split())[:70] for part in (self.old, self.new))
        return f"{self.file}:{self.line}: {old}  ->  {new}"


def faults_of(room: str, file: Path) -> Iterator[Fault]:
    """Yield all faults of a module."""
    source, name = file.read_bytes(), str(file.relative_to(ROOT))
    starts = [0, *accumulate(map(len, source.splitlines(keepends=True)))]
    for node, new in _changes(ast.parse(source)):
        begin = starts[node.lineno - 1] + node.col_offset
        end = starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
        changed = (source[:begin] + new.encode() + source[end:]).decode()
        yield Fault(room, name, node.lineno, source[begin:end].decode(), new, changed)


def _changes(module: ast.Module) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
    """Yield nodes, each with the text in its place."""
    for node in _code(module):
        if isinstance(node, ast.expr):
            for new in _changed(node):
                yield node, f"({ast.unparse(ast.fix_missing_locations(new))})"
        elif _may_be_dropped(node):
            yield node, "pass"
        elif isinstance(node, ast.FunctionDef) and ast.unparse(node.returns or node) == "bool":
            for each in ast.walk(node):
                if isinstance(each, ast.Return) and each.value:
                    yield each.value, f"(not ({ast.unparse(each.value)}))"


def _code(node: ast.AST) -> Iterator[ast.expr | ast.stmt]:
    """Yield what runs: neither annotations nor docstrings, nor what only type checkers read."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "type_params"):
            continue
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, ast.If) and "TYPE_CHECKING" in ast.unparse(each.test):
                continue
            if isinstance(each, ast.expr | ast.stmt):
                yield each
            if isinstance(each, ast.AST) and not isinstance(each, ast.JoinedStr):
                yield from _code(each)


def _changed(node: ast.expr) -> Iterator[ast.expr]:
    """Yield an expression changed at one place."""
    match node:
        case ast.Compare():
            for index, operator in enumerate(node.ops):
                new = deepcopy(node)
                new.ops[index] = _FLIPPED[type(operator)]()
                yield new
        case ast.UnaryOp(ast.Not(), operand):
            yield operand
        case ast.IfExp(test, body, orelse):
            yield ast.IfExp(test, orelse, body)
        case ast.BoolOp(operator, values):
            other = ast.And() if isinstance(operator, ast.Or) else ast.Or()
            yield ast.BoolOp(other, values)
            yield ast.BoolOp(operator, [ast.UnaryOp(ast.Not(), values[0]), *values[1:]])
        case ast.Constant(value) if type(value) is int:
            yield ast.Constant(value + 1)
            yield ast.Constant(value - 1)
        case ast.Subscript(value, ast.Slice()):
            yield value


def _may_be_dropped(node: ast.stmt) -> bool:
    """Return whether a statement acts: a call, an `await`, a `raise` of what was caught."""
    match node:
        case ast.Expr(
            ast.Call(ast.Attribute(ast.Name("log") | ast.Attribute(ast.Name("self"), "_log")))
        ):
            return False
        case ast.Expr(ast.Call() | ast.Await()) | ast.Raise(None):
            return True
    return False


def tests_of(file: str) -> list[str]:
    """Return the tests of a module's folder: by its name first, then those that import it."""
    module = Path(file).relative_to("metagpu")
    folder = ROOT / "tests" / module.parent
    while not (every := sorted(folder.rglob("test_*.py"))):
        folder = folder.parent
    name = ".".join(("metagpu", *module.with_suffix("").parts))
    named = [one for one in every if one.stem.startswith(f"test_{module.stem}")]
    users = [one for one in every if f"{name} import" in one.read_text(encoding="utf-8")]
    if folder.name == "agent" and (named or users):
        every = []  # minutes of whole daemons, of all modules
    return [str(one.relative_to(ROOT)) for one in dict.fromkeys((*named, *users, *every))]


class Copy:
    """A copy of the tree, in which tests run."""

    def __init__(self, folder: Path) -> None:
        self._tree = folder / "tree"
        left_out = shutil.ignore_patterns(".*", "dist", "__pycache__")
        shutil.copytree(ROOT, self._tree, ignore=left_out)

    def plant(self, file: str, text: str) -> str:
        """Write a module, and return its text of before; what was compiled of it goes."""
        before = (path := self._tree / file).read_text(encoding="utf-8")
        path.write_text(text, encoding="utf-8")
        for compiled in path.parent.glob(f"__pycache__/{path.stem}.*"):
            compiled.unlink()
        return before

    def failure(self, tests: Sequence[str], limit: float) -> str:
        """Return the first test that fails, "" if none does."""
        command = ["timeout", "--kill-after=5", f"{limit:.0f}", sys.executable, "-m", "pytest"]
        command += ["-q", "-x", "-p", "no:cacheprovider", *tests]
        env = {**os.environ, "PYTHONPATH": str(self._tree)}
        with tempfile.TemporaryFile("w+") as out:  # a pipe would wait for what tests left running
            code = subprocess.call(command, cwd=self._tree, env=env, stdout=out, stderr=out)  # noqa: S603
            out.seek(0)
            lines = out.read().splitlines()
        if code in (0, 124, 137):
            return f"no end within {limit:.0f} s" if code else ""
        failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
        return failed[0].split(" - ")[0] if failed else (lines or ["no output"])[-1]


def main() -> int:
    """Plant faults; return 1 if some survived."""
    parser = ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the draw")
    parser.add_argument("--count", type=int, default=40, help="faults, spread over the rooms")
    parser.add_argument("--rooms", nargs="*", default=ROOMS, help="below metagpu/")
    asked = parser.parse_args()
    draw = random.Random(asked.seed)  # noqa: S311 - no secret
    drawn: list[Fault] = []
    for index, room in enumerate(asked.rooms):
        files = sorted((ROOT / "metagpu").glob(f"{room}/**/*.py")) or [ROOT / f"metagpu/{room}.py"]
        every = [each for file in files if "pb" not in file.parts for each in faults_of(room, file)]
        share = (asked.count + len(asked.rooms) - 1 - index) // len(asked.rooms)
        drawn += draw.sample(every, min(share, len(every)))
    caught: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy, limits = Copy(Path(folder)), dict[str, float]()
        for fault in drawn:
            tests = tests_of(fault.file)
            if (place := " ".join(sorted(tests))) not in limits:
                began = time.monotonic()
                if failed := copy.failure(tests, 1800):
                    sys.exit(f"{fault.file}: its tests fail without a fault: {failed}")
                limits[place] = 30 + 3 * (time.monotonic() - began)
            before = copy.plant(fault.file, fault.text)
            failed = copy.failure(tests, limits[place])
            copy.plant(fault.file, before)
            caught[fault.room] += bool(failed)
            print("caught  " if failed else "SURVIVED", fault, failed, flush=True)  # noqa: T201
    for room, number in Counter(fault.room for fault in drawn).items():
        print(f"{room:20} {caught[room]} of {number}: {caught[room] / number:.0%}")  # noqa: T201
    print(f"seed {asked.seed}: {caught.total()} of {len(drawn)} caught")  # noqa: T201
    return int(caught.total() < len(drawn))


if __name__ == "__main__":
    sys.exit(main())
