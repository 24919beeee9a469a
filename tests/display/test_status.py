"""The status tables: the state of a GPU in a few words."""

import re
import time
from collections.abc import Mapping
from typing import Any

import pytest
from msgspec import convert

from metagpu.core.model.shares import OfferTurn
from metagpu.core.reports.schema.gpus import SharesReport
from metagpu.core.reports.schema.status import StatusReport
from metagpu.core.state.facts import GpuFaulted, TurnsChanged
from metagpu.display import status as module
from metagpu.display.status import held_bars, show, show_plan, table
from tests.rigs.reported import CORDON, HELD, SUSPENDED, A, complete, gpu_report


def show_status(plain: Mapping[str, Any]) -> None:
    """Print a status with some fields."""
    module.show_status(complete(plain, StatusReport))


def show_explanation(plain: Mapping[str, Any]) -> None:
    """Print an explanation with some fields."""
    module.show_explanation(complete({**plain, "leases": []}, StatusReport))


def test_bars_show_held_free_and_unavailable() -> None:
    """Each resource has its bar, dotted where no pod can have the share."""
    assert [
        line.text
        for line in held_bars(convert(gpu_report(HELD)["shares"], dict[str, SharesReport]))
    ] == [
        "\u00b7" * 10 + " 0/4 metagpu",
        "\u2588" * 5 + "\u2591" * 5 + " 1/2 mps",
    ]
    assert [line.text for line in held_bars({})] == ["-"]


def test_a_status_names_owners(capsys: pytest.CaptureFixture[str]) -> None:
    """The table has each GPU's owner, also of an idle GPU."""
    one = gpu_report(HELD)
    show_status({"resources": {}, "gpus": [one, {**gpu_report(), "index": 1}], "leases": []})

    rows = capsys.readouterr().out
    assert "OWNER" in rows
    assert " mps " in rows
    assert " idle " in rows


def test_a_status_names_who_offers_idle_gpus_and_who_is_next(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """GPUs of one turn share a line, and a GPU in use has none."""
    at = time.monotonic() + 600
    idle = gpu_report(TurnsChanged({A.id: OfferTurn("fraction", 0, next="mps", until=at)}))
    used = gpu_report(TurnsChanged({A.id: OfferTurn("mps", 0)}), HELD)
    gpus = [idle, {**idle, "index": 1}, {**used, "index": 2}]
    show_status({"resources": {}, "gpus": gpus, "leases": []})

    out = capsys.readouterr().out
    said = re.search(r"GPU (.*): idle, offered by fraction now, by mps in (\d+)", out)
    assert said is not None
    assert said[1] == "0, 1"
    assert 500 <= int(said[2]) <= 600
    assert out.count("offered by") == 1


@pytest.mark.parametrize("columns", ["80", "200"])
def test_a_status_has_reasons_below_its_table(
    columns: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The table has a word, and a line below it the whole reason."""
    monkeypatch.setenv("COLUMNS", columns)
    ill = gpu_report(GpuFaulted(A.id, "XID 79: GPU has fallen off the bus", at=0), CORDON)
    show_status({"resources": {}, "gpus": [ill, {**gpu_report(), "index": 1}], "leases": []})

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
    """A narrow terminal leaves out columns and names them; words and bars stay whole."""
    monkeypatch.setenv("COLUMNS", columns)
    one = {**gpu_report(SUSPENDED, HELD), "product": "NVIDIA A100-SXM4-40GB", "pool": "notebooks"}
    status = {"resources": {}, "gpus": [one], "leases": [], "remarks": []}
    show_explanation({**status, "gpus": [{**one, "poolReason": "matches product *A100*"}]})
    explained = capsys.readouterr().out
    show_status(status)
    told_of = capsys.readouterr().out

    assert {"A100-SXM4-40GB", "suspended", "matches", "*A100*"} <= set(explained.split())
    assert {"A100-SXM4-40GB", "suspended", "1/2", "mps"} <= set(told_of.split())
    [head] = [line for line in told_of.splitlines() if "PRODUCT" in line and "HEALTH" in line]
    assert [name for name in ("MEMORY", "POOL") if name not in head.split()] == left_out.split()
    mark = f"… not in this narrow table: {', '.join(left_out.split())}; -o json has all"
    assert (mark in told_of) == bool(left_out)
    lines = [*explained.splitlines(), *told_of.splitlines()]
    assert all(len(line) <= int(columns) for line in lines)


def test_an_explanation_has_reasons_below_its_table(capsys: pytest.CaptureFixture[str]) -> None:
    """Long reasons are below the table, as in a status."""
    show_explanation({"resources": {}, "gpus": [gpu_report(SUSPENDED)], "remarks": []})

    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert "GPU 0: mps suspended: no daemon, since 1970-01-01 00:02:00 UTC" in lines


def test_status_begins_with_a_configuration_that_was_not_taken(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A refused configuration is the first line; without one there is no line."""
    status = {"resources": {}, "gpus": [gpu_report()], "leases": []}
    show_status({**status, "configuration": {"error": "new.yaml: 3: pools: wrong"}})
    show_status({**status, "configuration": {"error": None}})
    waiting = {"version": "0.2.0", "problems": ["the driver: it is not loaded"]}
    show_status({**status, "standby": waiting})

    out = capsys.readouterr().out
    assert out.startswith("configuration rejected: new.yaml: 3: pools: wrong")
    assert out.count("configuration") == 1
    assert "the next daemon is not ready: the driver: it is not loaded" in out


def test_a_status_says_why_gpus_are_in_no_pool(capsys: pytest.CaptureFixture[str]) -> None:
    """GPUs that no pool has share a line for each reason, below the table."""
    card = {"pool": None, "poolReason": "no pool selects it (all: it is a display card)"}
    gpus = [gpu_report(), *({**gpu_report(), "index": number, **card} for number in (1, 3))]
    show_status({"resources": {}, "gpus": gpus, "leases": []})

    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("GPU ")]
    assert lines == ["GPU 1, 3: no pool selects it (all: it is a display card)"]


def test_a_status_has_misfits_and_mixed_requests(capsys: pytest.CaptureFixture[str]) -> None:
    """GPUs without anything of their pool, and containers that see one GPU, have a line each."""
    status = {"resources": {}, "gpus": [gpu_report()], "leases": []}
    mixed = {"holder": "team/alice (main)", "reason": "container main holds GPU 0"}
    configuration = {"error": None, "misfits": ["GPU 1: a share is too large"]}
    show_status({**status, "configuration": configuration, "mixedRequests": [mixed]})

    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [
        "configuration does not fit GPU 1: a share is too large",
        "team/alice: container main holds GPU 0",
    ]


def test_a_status_has_the_problems_of_cdi(capsys: pytest.CaptureFixture[str]) -> None:
    """Problems of the CDI file and of the libraries each have a line; otherwise none."""
    well: Mapping[str, Any] = {}
    dra = {"driver": "gpu.metagpu.io", "problem": "refused", "crowded": ["GPU 0 serves 2"]}
    show_status({**well, "dra": dra})
    printed = capsys.readouterr().out
    assert "DRA driver gpu.metagpu.io: refused" in printed
    assert "GPU 0 serves 2" in printed
    contested = {"contested": {"nvidia.com/gpu": "whole"}, "classesProblem": "denied"}
    cluster = {"problem": "", "features": {}, "resourceSlices": contested}
    show_status({**well, "cluster": cluster})
    printed = " ".join(capsys.readouterr().out.split())  # as wide as the terminal is
    assert "offers it here, and the DeviceClass whole has it too" in printed
    assert "API server, DeviceClasses: denied" in printed
    show_status({**well, "cdi": {"problem": "/cdi is full", "noLibraries": "no nvidia-ctk"}})
    printed = capsys.readouterr().out
    assert "containers may not start: /cdi is full" in printed
    assert "containers get no libraries of the driver by CDI: no nvidia-ctk" in printed

    show_status({**well, "cdi": {"problem": None, "noLibraries": None}})
    assert "containers" not in capsys.readouterr().out


def test_a_status_says_why_mgctl_does_not_answer(capsys: pytest.CaptureFixture[str]) -> None:
    """A socket of containers that is not served has a line with the reason; otherwise none."""
    well: Mapping[str, Any] = {}
    show_status({**well, "mgctl": {"inPods": True, "problem": "the relay of calls has ended"}})
    expected = "containers get no answers from mgctl: the relay of calls has ended"
    assert expected in capsys.readouterr().out

    show_status({**well, "mgctl": {"inPods": True, "problem": None}})
    assert "mgctl" not in capsys.readouterr().out


def test_a_status_names_pods_whose_devices_are_gone(capsys: pytest.CaptureFixture[str]) -> None:
    """Pods with lost devices are above the tables, with the fix."""
    one = {
        "holder": "team/alice (main)",
        "reason": "container main was given MIG-1, which is no more",
    }
    show_status({"resources": {}, "gpus": [gpu_report()], "leases": [], "lostDevices": [one]})

    out = capsys.readouterr().out
    assert out.startswith("team/alice: container main was given MIG-1, which is no more")


def test_a_status_has_the_policy_of_each_pool(capsys: pytest.CaptureFixture[str]) -> None:
    """A line says what follows from too much memory, also by a policy that is not known here."""
    show_status({"gpus": [], "memoryPolicies": {"a": "kill", "b": "newer"}})
    out = capsys.readouterr().out
    assert "pool a: processes above the memory of their share end (policy kill)" in out
    assert "pool b: memory (policy newer)" in out


def test_a_status_ends_with_the_backends_notes(capsys: pytest.CaptureFixture[str]) -> None:
    """Each note of a backend is a line below the tables."""
    remarks = ["GPU 0: the GPU is full", "if a/b (c) moved, there would be room"]
    notes = [{"text": remark} for remark in remarks]
    show_status({"resources": {}, "gpus": [gpu_report()], "leases": [], "remarks": notes})

    assert capsys.readouterr().out.splitlines()[-2:] == remarks


def test_a_plan_names_the_pods_that_it_waits_for(capsys: pytest.CaptureFixture[str]) -> None:
    """A plan has arrows at differences, pods that it waits for, and settings."""
    holding = {
        "holder": "team/old (main)",
        "sharers": ["team/new (main)"],
        "resource": "a.b/c",
        "shares": 3,
    }
    one = {
        "index": 0,
        "uuid": A.id,
        "product": "NVIDIA A100",
        "change": "changed",
        "poolBefore": "a",
        "poolAfter": "a",
        "backendsBefore": ["fraction"],
        "backendsAfter": ["whole"],
        "waitsFor": [holding, {**holding, "holder": None, "sharers": []}],
    }
    show_plan({"resources": {}, "gpus": [one], "settings": ["health"]})

    out = capsys.readouterr().out
    assert "nothing is offered" in out
    assert "fraction -> whole" in out
    words = " ".join(out.split())
    assert "team/old (main), team/new (main): 3 of a.b/c" in words
    assert "settings that change at once: health" in words


def test_lines_in_a_pipe_are_not_folded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a pipe a line stays one line, however long, and complete."""
    monkeypatch.delenv("COLUMNS", raising=False)
    pool, reason = "p" * 90, f"a reason that is longer than a terminal is wide: {'x ' * 60}"
    one = {**gpu_report(GpuFaulted(A.id, reason, at=0)), "product": "NVIDIA A100", "pool": pool}
    show_status(
        {"resources": {}, "gpus": [one], "leases": [], "remarks": [{"text": "words " * 40}]}
    )

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
    """In any terminal width names and numbers stay whole, and no line ends in blanks."""
    monkeypatch.setenv("COLUMNS", columns)
    drawn = table("POD", "RESOURCE", "GPU 0", whole=["GPU 0"])
    slices = "3 3 3 3 2 2 1 ·"
    drawn.add("a-pod-with-a-long-name", "example.com/a-long-resource", slices)
    show("before", drawn)
    printed = capsys.readouterr().out

    for whole in ("a-pod-with-a-long-name", "example.com/a-long-resource", "3 3 3 3 2 2 1 ·"):
        assert whole in printed
    assert [line for line in printed.split("\n") if line.endswith(" ")] == []


def test_a_status_names_all_pods_of_a_shared_claim(capsys: pytest.CaptureFixture[str]) -> None:
    """Each container that uses shares of a ResourceClaim has a line; so has a new claim."""
    lease = {"resource": "a.b/c", "resourceClaim": "team/ours", "shares": 5}
    shared = {**lease, "holder": "team/one (main)", "sharers": ["team/two (main)"]}
    show_status({"leases": [shared, {**lease, "shares": 7}]})
    out = capsys.readouterr().out
    assert [name in out for name in ("team/one (main)", "team/two (main)")] == [True, True]
    assert "ResourceClaim team/ours" in out
