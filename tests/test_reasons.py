"""Every Event, condition, warning and error has its row in docs/events.md, with its sentences."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from bench.figures import Report
from docs import availability, performance, reasons, status_schema
from metagpu.core.config.errors import ConfigReason
from metagpu.kubectl.obstacles import Obstacle
from metagpu.plugins.cluster.event_recorder import EventReason


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty package that is read for the log, in place of metagpu."""
    monkeypatch.setattr(reasons, "PACKAGE", tmp_path)
    return tmp_path


def test_the_page_is_what_the_code_says(capsys: pytest.CaptureFixture[str]) -> None:
    """Each reason has a row with all sentences, and each row a reason."""
    assert reasons.main(["--check"]) == 0, capsys.readouterr().err


def test_a_new_reason_needs_its_sentences(
    package: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A new event of the log gets a row, and the check refuses the row without sentences."""
    page = tmp_path / "events.md"
    page.write_text(reasons.PAGE.read_text())
    monkeypatch.setattr(reasons, "PAGE", page)
    (package / "new.py").write_text("log.info('begun')\nlog.warning('fan stopped', gpu=1)\n")

    assert reasons.main([]) == 1
    assert "| fan stopped |  |  |" in page.read_text().splitlines()
    assert "fan stopped" in capsys.readouterr().err
    assert "begun" not in page.read_text()


@pytest.mark.parametrize("text", ["f'{name} failed'", "name"])
def test_a_computed_event_is_refused(package: Path, text: str) -> None:
    """An event of the log is one constant text, by which people search."""
    (package / "new.py").write_text(f"self._log.error({text}, gpu=1)\n")
    with pytest.raises(reasons.UnknownReasonError, match=r"new\.py:1"):
        reasons.errors()


def test_every_kind_of_refusal_is_a_row_by_its_label() -> None:
    """A refusal has a row under the label of its metric, also one that is a kind of another."""
    found = {refusal[0]: refusal[1] for refusal in reasons.refusals()}
    assert found["`gpu_unhealthy`"] == "A pod asks for a share of a GPU that is out of service."
    assert "`provisioning_lasts`" in found  # a kind of `provisioning_failed`


def test_an_error_has_a_class_that_names_its_cause(package: Path) -> None:
    """An error without a class of its own has no reason, and is refused."""
    (package / "new.py").write_text("class MetagpuError(Exception): ...\nraise MetagpuError('x')\n")
    with pytest.raises(reasons.UnknownReasonError, match=r"new\.py:2"):
        reasons.command_errors()


def test_errors_of_commands_are_rows_wherever_their_class_is() -> None:
    """Each class below the base of our errors has a row, but for those of the other tables."""
    found = [error[0] for error in reasons.command_errors()]
    assert {"`no_daemon`", "`driver_replaced`", "`unknown_field`", "`sim_error`"} <= set(found)
    assert {"`config_error`", "`request_error`", "`gpu_unhealthy`"}.isdisjoint(found)
    assert {name.strip("`") for name in found}.isdisjoint(ConfigReason)


@pytest.mark.parametrize(
    "obstacle", [obstacle for obstacle in Obstacle if obstacle is not Obstacle.NONE]
)
def test_each_obstacle_has_a_row(obstacle: Obstacle) -> None:
    """docs/kubectl.md says of each obstacle what it means and what to do."""
    rows = [
        line.split(" | ")[0]
        for line in (reasons.DOCS / "kubectl.md").read_text(encoding="utf-8").splitlines()
        if line.startswith("| `")
    ]
    assert any(f"`{obstacle.name.lower()}`" in row for row in rows)


@pytest.mark.parametrize("reason", ConfigReason)
def test_each_kind_is_that_of_an_error(reason: ConfigReason) -> None:
    """No kind of the errors of configurations is without an error."""
    files = reasons.PACKAGE.rglob("*.py")
    assert any(f"ConfigReason.{reason.name}" in file.read_text(encoding="utf-8") for file in files)


def test_a_sentence_of_a_translation_has_its_names_by_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part that varies is `…`, a name is that by default; a computed sentence is refused."""
    file = tmp_path / "warnings.py"
    monkeypatch.setattr(reasons, "WARNINGS", file)
    file.write_text("def _of_pod(settings):\n    yield f'{settings.cores}: {count} is ignored'\n")
    assert reasons.translation_warnings() == [("nvidia.com/gpucores: … is ignored",)]
    file.write_text("def _of_pod(sentence):\n    yield sentence\n")
    with pytest.raises(reasons.UnknownReasonError, match="no sentence"):
        reasons.translation_warnings()


def test_types_are_those_of_the_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The type of an Event is that of its call, also where the reason has a name of its own."""
    names = [reason.name for reason in EventReason]
    calls = [f"    EventData(node, EventReason.{name}, note, 'Do')" for name in names[3:]]
    (tmp_path / "new.py").write_text(
        f"def event():\n    EventData(node, EventReason.{names[0]}, note, 'Do', warning=True)\n"
        f"    reason = EventReason.{names[1]} if never else EventReason.{names[2]}\n"
        "    EventData(node, reason, note, 'Do', warning=bool(pods))\n" + "\n".join(calls)
    )
    monkeypatch.setattr(reasons, "CLUSTER", tmp_path)

    found = {event[0]: event[1] for event in reasons.events()}
    types = [found[f"`{EventReason[name]}`"] for name in names[:4]]
    assert types == ["Warning", *["Normal or Warning"] * 2, "Normal"]


def test_the_table_of_reasons_is_what_the_code_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """docs/pools.md has each row of the table; a page that lacks one is refused, and written."""
    assert availability.main(["--check"]) == 0

    page = tmp_path / "pools.md"
    lines = availability.PAGE.read_text().splitlines(keepends=True)
    page.write_text("".join(line for line in lines if not line.startswith("| `cordoned`")))
    monkeypatch.setattr(availability, "PAGE", page)
    assert availability.main(["--check"]) == 1
    assert availability.main([]) == 0
    assert page.read_text() == "".join(lines)


def test_the_page_of_the_status_is_what_the_schema_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each field of the reports is there with value and meaning; an older page is refused."""
    assert status_schema.main(["--check"]) == 0, capsys.readouterr().err
    page = tmp_path / "status.md"
    page.write_text("older")
    monkeypatch.setattr(status_schema, "PAGE", page)
    assert status_schema.main(["--check"]) == 1
    assert status_schema.main([]) == 0
    assert "- `usedMiB` (number): memory in use, in MiB; " in page.read_text()


def test_the_page_of_costs_is_what_the_newest_results_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Tables and plots are the newest file's; a figure that it lacks is a dash, and is named."""
    assert performance.main(["--check"]) == 0, capsys.readouterr().err
    report = Report.read(performance.newest())
    kept = [figure for figure in report.figures if "excess" not in figure.name]
    for name, figures in (("2026-11-21d.json", report.figures), ("2026-11-21.json", kept)):
        replace(report, figures=figures).write(tmp_path / name)
    page = tmp_path / "performance.md"
    page.write_text(performance.PAGE.read_text())
    for name, path in (("PAGE", page), ("IMAGES", tmp_path), ("RESULTS", tmp_path)):
        monkeypatch.setattr(performance, name, path)
    assert performance.main(["--check"]) == 1
    assert "performance-waits.svg" in capsys.readouterr().err
    assert performance.main([]) == 0
    assert "lacks: excess" not in capsys.readouterr().err
    assert performance.main(["--check"]) == 0
    assert "| memory excess to the end | -" not in page.read_text()

    (tmp_path / "2026-11-21d.json").unlink()
    assert performance.main(["--check"]) == 1
    assert performance.main([]) == 0
    assert "2026-11-21.json lacks: excess to the end of a process" in capsys.readouterr().err
    assert "| memory excess to the end | - |  | With" in page.read_text()


def test_a_missed_goal_needs_its_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The check refuses a goal that is missed without a sentence, and no goal that is met."""
    [figure, *_] = Report.read(performance.newest()).figures
    for most in (figure.measured, figure.measured / 2):
        goal = performance.Goal("planted", (figure.name,), most, figure.unit)
        monkeypatch.setattr(performance, "GOALS", [goal])
        assert performance.main(["--check"]) == 1  # the page has other goals
        assert ("planted" in capsys.readouterr().err) is (most < figure.measured)
