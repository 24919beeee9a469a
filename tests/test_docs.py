"""The documentation is correct: its commands, its files, its tables, its links."""

import ast
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from anyio import to_thread
from msgspec.structs import replace

from metagpu.cli import arguments, mgctl
from metagpu.cli.metagpu import main
from metagpu.core.config.config import parse
from metagpu.core.contracts.backend import installed_backends
from metagpu.core.model.xid_severity import DEFAULT_XIDS, Severity
from metagpu.core.reports.doctor import CHECKS
from metagpu.core.usage.report import usage_report
from metagpu.kubectl import program as kubectl_program
from metagpu.plugins.control.socket import control_server
from metagpu.sim.machine.gpu_models import GPU_MODELS, NvlinkFabric
from metagpu.sim.machine.spec import build_node
from tests.core.usage.test_report import RULES
from tests.core.usage.test_report import node as usage_node

ROOT = Path(__file__).parents[1]
PAGES = [
    *(ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md"),
    ROOT / "bench" / "README.md",
    *(ROOT / "deploy" / "chart" / "README.md", ROOT / "tests" / "e2e" / "README.md"),
    *sorted((ROOT / "docs").rglob("*.md")),
]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(kind: str) -> Iterator[tuple[str, str]]:
    """Return the code blocks of a kind, each with its page."""
    for page in PAGES:
        for found in BLOCK.finditer(page.read_text(encoding="utf-8")):
            if found[1] == kind:
                yield str(page.relative_to(ROOT)), found[2]


def commands() -> Iterator[tuple[str, tuple[str, ...]]]:
    """Return every metagpu command line of a page, without the shell's parts."""
    for page, block in blocks("console"):
        for line in re.findall(r"^\$ ((?:kubectl metagpu|metagpu|mgctl) .*)$", block, re.MULTILINE):
            words = shlex.split(line, comments=True)
            end = min(
                (words.index(name) for name in ("|", ">", "&", "&&", "...") if name in words),
                default=99,
            )
            yield page, tuple(words[:end])


def section(page: str, heading: str) -> list[list[str]]:
    """Return the rows of the first table after a line of a page."""
    text = (ROOT / page).read_text(encoding="utf-8")
    table = text[text.index(heading) :].split("\n|", 1)[1].split("\n\n", 1)[0].rstrip()
    rows = [[cell.strip(" `") for cell in row.strip("|").split("|")] for row in table.split("\n")]
    return rows[2:]


@pytest.mark.parametrize(("page", "words"), sorted(set(commands())), ids=str)
def test_every_command_is_understood(page: str, words: tuple[str, ...]) -> None:
    """The parser accepts every command line of the pages."""
    program, *rest = words
    if program == "kubectl":
        program, *rest = rest
        reads = kubectl_program.parser()
    else:
        reads = arguments.parser() if program == "metagpu" else mgctl.parser()

    assert reads.parse_args(rest) is not None, page


def test_every_configuration_is_good() -> None:
    """Each whole configuration of the pages is valid as it is."""
    shown = [
        (page, name) for page, name in blocks("yaml") if name.startswith("version: metagpu/v1")
    ]
    backends = installed_backends()

    assert len(shown) > 5
    for page, text in shown:
        parse(text, page, backends)


def test_the_node_file_is_good(tmp_path: Path) -> None:
    """The node file of the simulator's page builds the node that the page describes."""
    [text] = [
        text for page, text in blocks("yaml") if page == "docs/simulator.md" and "driver:" in text
    ]
    file = tmp_path / "node.yaml"
    file.write_text(text.replace("/var/tmp", str(tmp_path)))  # noqa: S108 - it is what the page says

    assert [gpu.model.key for gpu in build_node(str(file)).gpus] == ["a100-40gb"] * 4 + [
        "h100-80gb"
    ]


def test_every_profile_for_the_chart_is_good() -> None:
    """Profiles that pages give to the chart are valid configurations."""
    given = [
        (page, profile)
        for page, text in blocks("yaml")
        for document in yaml.safe_load_all(text)
        if isinstance(document, dict) and isinstance(document.get("config"), dict)
        for profile in document["config"].get("map", {}).values()
    ]

    assert len(given) > 1
    for page, profile in given:
        parse(profile, page, installed_backends())


def test_every_value_for_the_chart_exists() -> None:
    """Values that commands and files of the pages set are those of `values.yaml`."""
    values = yaml.safe_load((ROOT / "deploy" / "chart" / "values.yaml").read_text(encoding="utf-8"))
    commands = [
        line for _, text in blocks("console") for line in text.splitlines() if "/chart " in line
    ]
    given = [
        key for command in commands for key in re.findall(r"--set(?:-json)? ([\w.-]+)=", command)
    ]
    given += [
        key
        for page, text in blocks("yaml")
        if page in {"docs/install.md", "deploy/chart/README.md"}
        for document in yaml.safe_load_all(text)
        if "apiVersion" not in document
        for key in document
    ]

    assert {"simulate", "image.repository", "config", "privileges"} <= set(given)
    for key in given:
        there = values
        for part in key.split("."):
            assert part in there, key
            there = there[part]


def test_files_of_other_programs_are_good(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`metagpu validate` accepts the files of the page about migration, by their programs."""
    files = [text for page, text in blocks("yaml") if page == "docs/migrating.md"]
    for number, text in enumerate(files):
        (tmp_path / f"{number}.yaml").write_text(text)
    manifests = {number for number, text in enumerate(files) if text.startswith("affinity:")}
    names = [
        str(tmp_path / f"{other}.yaml") for other in range(len(files)) if other not in manifests
    ]

    assert len(manifests) == 1
    assert main(["validate", *names]) == 0
    out = capsys.readouterr().out
    for program in ("MetaGPU", "NVIDIA device plugin v1", "mig-parted", "HAMi"):
        assert program in out


def test_every_block_is_well_formed() -> None:
    """YAML of the pages can be read, and Python compiles."""
    for page, text in blocks("yaml"):
        assert list(yaml.safe_load_all(text)), page
    for page, text in blocks("python"):
        compile(text, page, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


async def test_the_module_for_frameworks_knows_its_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`gpu_share.py` of the data scientists' page computes the part from what `mgctl` prints."""
    [text] = [name for page, name in blocks("python") if "def fraction" in name]
    program = tmp_path / "mgctl"
    program.write_text(
        f'#!/bin/sh\nexec {sys.executable} -m metagpu.cli.mgctl "$@" --run-dir {tmp_path}\n'
    )
    program.chmod(0o755)
    module: dict[str, Any] = {}
    exec(text.replace("/run/metagpu/mgctl", str(program)), module)  # noqa: S102 - a block of a page

    snapshot, used = usage_node()
    gpu = next(iter(snapshot.gpus.values())).gpu
    assert gpu.memory is not None
    quarter = gpu.memory // 4 // 2**20
    monkeypatch.setenv("METAGPU_MEMORY_MIB", f"{gpu.id}={quarter},GPU-other=1")

    async def usage(_: object) -> object:
        return replace(usage_report(snapshot, used, RULES), node="n")

    async with control_server(tmp_path, {"usage": usage}):
        assert module["part"]() == (gpu.id, quarter)
        assert await to_thread.run_sync(module["fraction"]) == pytest.approx(0.25)
        assert await to_thread.run_sync(module["fraction"], 2 * quarter) == 0


def test_troubleshooting_names_every_check() -> None:
    """Each code of the doctor is behind a symptom."""
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")

    assert [code for code in CHECKS if f"doctor.md#{code.lower()}" not in page] == []


def test_the_sites_navigation_has_every_page() -> None:
    """The site has the groups of the README's table, and every page but single decisions."""
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    nav = yaml.safe_load(text[text.index("nav:") : text.index("theme:")])["nav"]
    groups = {title: pages for value in nav[2:] for title, pages in value.items()}
    listed = {"README.md", "docs/glossary.md"}
    listed |= {
        page for pages in groups.values() for page in ([pages] if isinstance(pages, str) else pages)
    }
    decisions = set((ROOT / "docs" / "decisions").glob("0*.md"))
    rows = section("README.md", "## Where to go next")[1:]

    assert [row[0].lower() for row in rows] == [title.lower() for title in groups]
    for title, links in rows:
        named = {word.partition("#")[0] for word in re.findall(r"\]\(([^)]+)\)", links)}
        assert named <= listed, title
    assert {str(page.relative_to(ROOT)) for page in PAGES if page not in decisions} <= listed


@pytest.mark.parametrize("severity", list(Severity))
def test_every_xid_is_in_its_table(severity: Severity) -> None:
    """The page on health has the policy as it is, with each XID's meaning."""
    documented = {
        int(code): meaning for code, meaning in section("docs/health.md", f"**{severity}**")
    }

    assert documented == {
        code: rule.meaning for code, rule in DEFAULT_XIDS.items() if rule.severity is severity
    }


def test_every_model_is_in_the_table() -> None:
    """The simulator's page has the boards with their numbers."""
    assert section("docs/development/simulator.md", "## GPU models") == [
        [
            board.key,
            board.product,
            f"{board.memory} MiB",
            f"{board.reserved} MiB",
            ".".join(map(str, board.compute_capability)),
            "yes" if board.has_mig else "no",
            "none"
            if board.fabric is NvlinkFabric.NONE
            else f"{board.nvlinks}, {board.fabric.value}",
        ]
        for board in GPU_MODELS.values()
    ]


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page, as GitHub derives them from headings."""
    text = re.sub(BLOCK, "", page.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    plain = (
        re.sub(r"[^\w\- ]", "", re.sub(r"\]\([^)]*\)", "", heading).lower()) for heading in headings
    )
    return {name.replace(" ", "-") for name in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_has_a_target(page: Path) -> None:
    """Every link to another page, or to a heading of one, has a target."""
    text = re.sub(BLOCK, "", page.read_text(encoding="utf-8"))
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        there = (page.parent / path).resolve() if path else page
        if not there.exists() or (anchor and anchor not in anchors(there)):
            broken.append(link)
        elif not in_site(there.relative_to(ROOT)):
            broken.append(f"{link} is not in the site of `make docs`")

    assert broken == []


def in_site(file: Path) -> bool:
    """Return whether the site has a file of the repository; Makefile and mkdocs.yml say which."""
    if len(file.parts) == 1 or file.parts[0] == "tests":
        return file.suffix == ".md"
    return file.parts[0] in {"bench", "deploy", "docs", "proto"} and (ROOT / file).is_file()
