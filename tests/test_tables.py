"""What people read in tables: the state of a GPU in a few words."""

import pytest
from rich.text import Text

from metagpu.core.facts import GpuFaulted
from metagpu.core.layout import Layout
from metagpu.core.report import explanation
from metagpu.tables import fullness, show, show_explanation, show_plan, show_status, table
from tests.build import after
from tests.reported import CORDON, HELD, SUSPENDED, A, told


def test_bars_tell_held_from_free_from_shut() -> None:
    """Each resource has its bar; one that nobody may have is dotted."""
    assert str(fullness(told(HELD)["shares"])).splitlines() == [
        "\u00b7" * 10 + " 0/4 metagpu",
        "\u2588" * 5 + "\u2591" * 5 + " 1/2 mps",
    ]
    assert fullness({}) == "-"


def test_a_status_names_owners(capsys: pytest.CaptureFixture[str]) -> None:
    """Who has a GPU is in the table, an idle one too."""
    one = told(HELD)
    show_status({"resources": {}, "gpus": [one, {**told(), "index": 1}], "leases": []})

    rows = capsys.readouterr().out
    assert "OWNER" in rows
    assert " mps " in rows
    assert " idle " in rows


@pytest.mark.parametrize("columns", ["80", "200"])
def test_a_status_tells_reasons_below_its_table(
    columns: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A word stands in the table, the whole reason in a line below it."""
    monkeypatch.setenv("COLUMNS", columns)
    ill = told(GpuFaulted(A.id, "XID 79: GPU has fallen off the bus", at=0), CORDON)
    show_status({"resources": {}, "gpus": [ill, {**told(), "index": 1}], "leases": []})

    out = capsys.readouterr().out
    below = [line.rstrip() for line in out.splitlines() if line.startswith("GPU ")]
    assert below == [
        "GPU 0: XID 79: GPU has fallen off the bus, since 1970-01-01 00:00:00 UTC",
        "GPU 0: cordoned: riser, since 1970-01-01 00:01:00 UTC",
    ]
    assert out.count("XID 79") == 1
    assert all(len(line) <= int(columns) for line in out.splitlines())


@pytest.mark.parametrize(
    ("columns", "left_out"), [("70", "MEMORY POOL"), ("80", "MEMORY"), ("120", "")]
)
def test_a_narrow_terminal_breaks_no_word(
    columns: str, left_out: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What has no room is left out, memory first; each other word and bar stands in one piece."""
    monkeypatch.setenv("COLUMNS", columns)
    one = {**told(SUSPENDED, HELD), "product": "NVIDIA A100-SXM4-40GB", "pool": "notebooks"}
    status = {"resources": {}, "gpus": [one], "leases": [], "remarks": []}
    show_explanation({**status, "gpus": [{**one, "why": "matches product *A100*"}]})
    explained = capsys.readouterr().out
    show_status(status)
    told_of = capsys.readouterr().out

    assert {"A100-SXM4-40GB", "suspended", "matches", "*A100*"} <= set(explained.split())
    assert {"A100-SXM4-40GB", "suspended", "1/2", "mps"} <= set(told_of.split())
    assert [it for it in ("MEMORY", "POOL") if it not in told_of.split()] == left_out.split()
    lines = [*explained.splitlines(), *told_of.splitlines()]
    assert all(len(line) <= int(columns) for line in lines)


def test_an_explanation_tells_reasons_below_its_table(capsys: pytest.CaptureFixture[str]) -> None:
    """As in a status: a long sentence in a column would leave no room for the others."""
    show_explanation({"resources": {}, "gpus": [told(SUSPENDED)], "remarks": []})

    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert "GPU 0: mps suspended: no daemon, since 1970-01-01 00:02:00 UTC" in lines


def test_status_begins_with_a_configuration_that_was_not_taken(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What is wrong with the files is read before all else, and nothing where nothing is."""
    status = {"resources": {}, "gpus": [told()], "leases": []}
    show_status({**status, "configuration": {"error": "new.yaml: 3: pools: wrong"}})
    show_status({**status, "configuration": {"error": None}})

    out = capsys.readouterr().out
    assert out.startswith("configuration not taken: new.yaml: 3: pools: wrong")
    assert out.count("configuration") == 1


def test_a_status_says_what_containers_by_cdi_lack(capsys: pytest.CaptureFixture[str]) -> None:
    """A file that cannot be written, and libraries that nobody knows; nothing where all is well."""
    well = {**explanation(after(), Layout((), {}, ())), "leases": []}
    show_status({**well, "cdi": {"problem": "/cdi is full", "noLibraries": "no nvidia-ctk"}})
    said = capsys.readouterr().out
    assert "containers may not start: /cdi is full" in said
    assert "containers get no libraries of the driver by CDI: no nvidia-ctk" in said

    show_status({**well, "cdi": {"problem": None, "noLibraries": None}})
    assert "containers" not in capsys.readouterr().out


def test_a_status_names_pods_whose_devices_are_gone(capsys: pytest.CaptureFixture[str]) -> None:
    """Before the tables, with the pod and what helps."""
    one = {"holder": "team/alice (main)", "why": "container main was given MIG-1, which is no more"}
    show_status({"resources": {}, "gpus": [told()], "leases": [], "lost": [one]})

    out = capsys.readouterr().out
    assert out.startswith("team/alice: container main was given MIG-1, which is no more")


def test_a_status_ends_with_what_backends_remark(capsys: pytest.CaptureFixture[str]) -> None:
    """Each sentence of a backend stands below the tables, on its own line."""
    remarks = ["GPU 0: it is full", "if a/b (c) moved, there would be room"]
    show_status({"resources": {}, "gpus": [told()], "leases": [], "remarks": remarks})

    assert capsys.readouterr().out.splitlines()[-2:] == remarks


def test_a_plan_names_who_is_waited_for(capsys: pytest.CaptureFixture[str]) -> None:
    """A plan is drawn with arrows where something differs, pods that are waited for, settings."""
    holding = {"holder": "team/old (main)", "resource": "a.b/c", "shares": 3}
    one = {
        "index": 0,
        "uuid": A.id,
        "product": "NVIDIA A100",
        "change": "changed",
        "poolBefore": "a",
        "poolAfter": "a",
        "backendsBefore": ["fraction"],
        "backendsAfter": ["whole"],
        "waitsFor": [holding, {**holding, "holder": None}],
    }
    show_plan({"resources": {}, "gpus": [one], "settings": ["health"]})

    out = capsys.readouterr().out
    assert "nothing is offered" in out
    assert "fraction -> whole" in out
    words = " ".join(out.split())
    assert "team/old (main): 3 of a.b/c" in words
    assert "other terms from the next request or event on: health" in words


def test_what_goes_into_a_pipe_is_not_folded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A line is one thing, however long, for whoever reads it by a program; nothing is left out."""
    monkeypatch.delenv("COLUMNS", raising=False)
    pool, reason = "p" * 90, f"a reason that is longer than a terminal is wide: {'x ' * 60}"
    one = {**told(GpuFaulted(A.id, reason, at=0)), "product": "NVIDIA A100", "pool": pool}
    show_status({"resources": {}, "gpus": [one], "leases": [], "remarks": ["words " * 40]})

    lines = capsys.readouterr().out.splitlines()
    [head] = [line for line in lines if line.lstrip().startswith("GPU ") and "PRODUCT" in line]
    assert {"MEMORY", "POOL"} <= set(head.split())
    assert [line for line in lines if pool in line and "A100" in line]
    assert [line for line in lines if reason in line and "since 1970" in line]
    assert lines[-1].split() == ["words"] * 40
    assert max(map(len, lines)) < 1000  # nor is it filled up


@pytest.mark.parametrize("columns", ["20", "40", "80", "200"])
def test_no_table_is_cut(
    columns: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """However narrow a terminal is, names and numbers stay whole, and no line ends in blanks."""
    monkeypatch.setenv("COLUMNS", columns)
    drawn = table("POD", "RESOURCE", "GPU 0")
    slices = Text("3 3 3 3 2 2 1 ·", no_wrap=True)
    drawn.add_row("a-pod-with-a-long-name", "example.com/a-long-resource", slices)
    show("before", drawn)
    said = capsys.readouterr().out

    for whole in ("a-pod-with-a-long-name", "example.com/a-long-resource", "3 3 3 3 2 2 1 ·"):
        assert whole in said
    assert [line for line in said.split("\n") if line.endswith(" ")] == []
