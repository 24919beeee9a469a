"""The budget of the project: lines of each capability, and figures of the whole house.

`python -m tests.budget` prints them beside their limits, `--check` fails beyond one, and
`--tree PATH` measures another checkout. Who exceeds a limit takes as much away elsewhere, or raises
it with a reason in the commit.
"""

import ast
import sys
from argparse import ArgumentParser
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from statistics import median
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).parents[1]
GENERATED: Final = ("metagpu/plugins/kubelet/pb/", "metagpu/sim/allocation/pb/")


class Capability(NamedTuple):
    """A row of the table: what the product can do, where, and its most lines.

    Attributes:
        files: patterns below `metagpu/`; a file belongs to the first row that has one for it.
    """

    name: str
    ceiling: int
    files: tuple[str, ...]


class Limit(NamedTuple):
    """A limit of a figure of the whole house, and the goal that it moves to."""

    name: str
    limit: float
    goal: float
    at_least: bool = False


CAPABILITIES: Final = (
    Capability("simulator", 15145, ("sim/*",)),
    Capability(
        "DRA",
        5000,
        (
            "plugins/dra/*",
            "core/devices/*",
            "core/model/resource_claims.py",
            "agent/*claim*",
            "plugins/cluster/*slice*",
            "plugins/cluster/*claims*",
            "compat/nvidia_claims.py",
        ),
    ),
    Capability("device plugin", 4141, ("plugins/kubelet/*",)),
    Capability("cluster: labels, Events, Node", 5667, ("plugins/cluster/*",)),
    Capability("agent", 3863, ("agent/*", "__init__.py", "__main__.py", "patches.py")),
    Capability("availability, leases, model", 5076, (
        "core/availability/*", "core/state/*", "core/model/*", "core/errors.py", "core/__init__.py",
    )),
    Capability("layout and grants", 2047, ("core/layout/*", "core/grants/*")),
    Capability("contracts and runtime", 2292, ("core/contracts/*", "core/runtime/*")),
    Capability("configuration and other formats", 4550, ("core/config/*", "compat/*")),
    Capability("health", 1000, ("core/health/*",)),
    Capability("enforcement and usage", 3755, ("core/usage/*",)),
    Capability("MIG", 3849, ("backends/mig/*",)),
    Capability("MPS", 1460, ("backends/mps/*", "backends/common/mps_daemon/*")),
    Capability("fraction, timeslice, whole", 1050, ("backends/*",)),
    Capability("NVML and host", 5288, ("nvml/*", "host/*")),
    Capability("metrics", 1850, ("plugins/metrics/*",)),
    Capability("web", 1514, ("plugins/web/*", "plugins/http/*")),
    Capability("mgctl in containers", 1660, ("plugins/pod_api/*",)),
    Capability("cli, display, reports", 7256, (
        "cli/*", "display/*", "core/reports/*", "plugins/control/*", "plugins/__init__.py",
    )),
    Capability("kubectl", 5640, ("kubectl/*",)),
    Capability("webhook and translation", 3858, ("webhook/*", "translation/*")),
    Capability("tests of other backends", 579, ("testing/*",)),
)  # fmt: skip
"""Every file of `metagpu/` but generated code belongs to exactly one."""

LIMITS: Final = (
    Limit("modules without the simulator", 291, 290),
    Limit("lines of a module, the median", 220, 190, at_least=True),
    Limit("modules with one importer, in their own folder", 50, 45),
    Limit("modules of more than 450 lines", 0, 0),
    Limit("product lines", 86524, 75000),
    Limit("test lines", 113447, 92300),
    Limit("fields of GpuState", 16, 16),
    Limit("properties and methods of GpuState", 8, 8),
    Limit("kinds of facts", 36, 36),
    Limit("structs named Timing", 20, 20),
    Limit("decisions", 49, 48),
    Limit("words of README.md, docs/*.md and docs/backends/*.md", 66151, 64700),
)


class Row(NamedTuple):
    """A measured figure beside its limit."""

    name: str
    now: float
    limit: float
    goal: float
    exceeded: bool


def measure_capabilities(
    tree: Path, capabilities: Sequence[Capability] = CAPABILITIES
) -> Iterator[Row]:
    """Yield the product lines of each capability.

    Raises:
        LookupError: files belong to no capability.
    """
    lines: Counter[str] = Counter()
    homeless = []
    for file, text in product_files(tree).items():
        inside = file.removeprefix("metagpu/")
        names = (
            row.name for row in capabilities if any(fnmatch(inside, other) for other in row.files)
        )
        if (name := next(names, None)) is None:
            homeless.append(file)
        else:
            lines[name] += text.count("\n")
    if homeless:
        raise LookupError(f"tests/budget.py names no capability for {', '.join(homeless)}")
    for row in capabilities:
        now = lines[row.name]
        yield Row(row.name, now, row.ceiling, row.ceiling, now > row.ceiling)


def measure_house(tree: Path, limits: Sequence[Limit] = LIMITS) -> Iterator[Row]:
    """Yield the figures of the whole house."""
    figures = _figures(tree)
    for row in limits:
        now = figures[row.name]
        exceeded = now < row.limit if row.at_least else now > row.limit
        yield Row(row.name, now, row.limit, row.goal, exceeded)


def product_files(tree: Path) -> Mapping[str, str]:
    """Return the text of all modules that are not generated, by path."""
    files = {str(file.relative_to(tree)): file for file in sorted((tree / "metagpu").rglob("*.py"))}
    return {
        path: file.read_text(encoding="utf-8")
        for path, file in files.items()
        if not path.startswith(GENERATED)
    }


def _figures(tree: Path) -> Mapping[str, float]:
    product = product_files(tree)
    trees = {path: ast.parse(text) for path, text in product.items()}
    classes = {
        node.name: node
        for module in trees.values()
        for node in ast.walk(module)
        if isinstance(node, ast.ClassDef)
    }
    modules = [
        text.count("\n")
        for path, text in product.items()
        if not path.startswith("metagpu/sim/") and not path.endswith("/__init__.py")
    ]
    state = classes["GpuState"].body
    facts = trees.get("metagpu/core/state/facts.py", ast.Module([], []))
    pages = [tree / "README.md", *(tree / "docs").glob("*.md"), *(tree / "docs/backends").glob("*")]
    values: Sequence[float] = (
        len(modules),
        median(modules),
        sum(_has_one_importer_beside_it(trees)),
        sum(lines > 450 for lines in modules),
        sum(text.count("\n") for text in product.values()),
        sum(file.read_text("utf-8").count("\n") for file in (tree / "tests").rglob("*.py")),
        sum(isinstance(node, ast.AnnAssign) for node in state),
        sum(isinstance(node, ast.FunctionDef) for node in state),
        sum(isinstance(node, ast.ClassDef) for node in facts.body),
        sum(name.endswith("Timing") for name in classes),
        len(list((tree / "docs/decisions").glob("[0-9]*.md"))),
        sum(len(page.read_text("utf-8").split()) for page in pages),
    )
    return dict(zip((limit.name for limit in LIMITS), values, strict=True))


def _has_one_importer_beside_it(trees: Mapping[str, ast.Module]) -> Iterator[bool]:
    """Yield for each module whether one other imports it alone, in the same folder."""
    names = {path: path.removesuffix(".py").replace("/", ".") for path in trees}
    known = {name.removesuffix(".__init__") for name in names.values()}
    importers: dict[str, set[str]] = defaultdict(set)
    for path, module in trees.items():
        for imported in _imports(module):
            found = imported if imported in known else imported.rpartition(".")[0]
            importers[found].add(names[path])
    for name in names.values():
        if not name.endswith(".__init__"):
            folders = [importer.rpartition(".")[0] for importer in importers[name]]
            yield folders == [name.rpartition(".")[0]]


def _imports(module: ast.Module) -> Iterator[str]:
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{name.name}" for name in node.names)


def main(arguments: Sequence[str]) -> int:
    """Print the budget, and return 1 if a limit is exceeded that shall be kept."""
    parser = ArgumentParser(prog="python -m tests.budget", description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail beyond a limit, print no others")
    parser.add_argument("--tree", type=Path, default=ROOT, help="measure another checkout")
    options = parser.parse_args(arguments)
    capabilities = list(measure_capabilities(options.tree))
    house = list(measure_house(options.tree))
    beyond = [row for row in (*capabilities, *house) if row.exceeded]
    if not options.check:
        _write("lines of a capability", capabilities)
        _write("the whole house", house)
    for row in beyond:
        sys.stderr.write(
            f"{row.name}: {row.now:g}, and the limit is {row.limit:g}: take as much away elsewhere,"
            " or raise the limit in tests/budget.py with the reason in the commit\n"
        )
    return 1 if options.check and beyond else 0


def _write(title: str, rows: Sequence[Row]) -> None:
    sys.stdout.write(f"{title:56} {'now':>8} {'limit':>8} {'goal':>8}\n")
    for row in rows:
        goal = f"{row.goal:g}" if row.goal != row.limit else ""
        line = f"  {row.name:54} {row.now:>8g} {row.limit:>8g} {goal:>8}"
        sys.stdout.write(f"{line.rstrip()}\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
