"""The command line `metagpu`: help, reports, errors, exit statuses."""

import io
import json
import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from anyio import to_thread

from metagpu.agent import config_source
from metagpu.cli.metagpu import main
from metagpu.core.reports.schema.status import StatusReport
from metagpu.display.table import CLEAR_SCREEN
from metagpu.plugins.cluster.settings import Feature
from metagpu.plugins.control.socket import control_server
from metagpu.sim.demo.script import show_demo
from metagpu.sim.machine.gpu_models import GPU_MODELS
from tests.cli.test_mgctl import TtyText, interrupted_after
from tests.rigs.reported import complete

TWO_POOLS = """\
version: metagpu/v1
pools:
  - name: big
    gpus: {minMemory: 40Gi}
    backends: [{backend: fraction, resource: example.com/big, sharesPerGpu: 10}]
  - name: small
    gpus: {product: "*T4*"}
    backends: [{backend: fraction, resource: example.com/small, memoryUnit: 1Gi}]
"""


def test_help_names_every_use_of_the_api_server(capsys: pytest.CaptureFixture[str]) -> None:
    """The help of `--cluster` names each possible value."""
    with pytest.raises(SystemExit):
        main(["run", "--help"])

    output = "".join(capsys.readouterr().out.split())  # lines are broken within names, at a hyphen
    assert f"of{','.join(Feature)};all,-taintleavesoneout" in output


def test_explain_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a file, eight GPUs are 800 shares of cnvrg.io/metagpu, all in one pool."""
    assert main(["explain", "--simulate", "a100-40gb:8", "--json"]) == 0

    report = json.loads(capsys.readouterr().out)
    assert report["resources"] == {"cnvrg.io/metagpu": {"capacity": 800, "allocatable": 800}}
    assert [gpu["index"] for gpu in report["gpus"]] == list(range(8))
    assert {(gpu["pool"], gpu["poolReason"]) for gpu in report["gpus"]} == {("all", "all GPUs")}


def test_explain_has_the_reason_of_each_pool(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each GPU has its pool with the reason, or the reason why no pool has it."""
    file = tmp_path / "two.yaml"
    file.write_text(TWO_POOLS)

    simulated = "a100-40gb:1,t4:1,a30:1"
    assert main(["explain", "--config", str(file), "--simulate", simulated, "--json"]) == 0

    report = json.loads(capsys.readouterr().out)
    big, small, neither = report["gpus"]
    assert report["resources"]["example.com/big"]["capacity"] == 10
    assert report["resources"]["example.com/small"]["capacity"] == 15
    assert big["pool"] == "big"
    assert small["pool"] == "small"
    assert neither["pool"] is None
    assert "big: " in neither["poolReason"]
    assert "small: " in neither["poolReason"]


def test_explain_has_the_reason_of_an_empty_pool(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A pool without GPUs has the reason."""
    file = tmp_path / "two.yaml"
    file.write_text(TWO_POOLS)

    assert main(["explain", "--config", str(file), "--simulate", "a100-40gb:2"]) == 0
    why = "pool small has no GPU here: NVIDIA A100-SXM4-40GB does not match *T4*"
    assert f"\n\n{why}\n" in capsys.readouterr().out


def test_a_display_card_is_left_out_as_by_nvidias_plugin(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The fourth GPU of a DGX Station drives its screen: no pod gets it, and its row says why."""
    file = tmp_path / "plugin.yaml"
    file.write_text("version: v1\nflags: {migStrategy: none}\n")
    station = "a100-80gb:3,dgx-display,a100-80gb"
    assert main(["explain", "--config", str(file), "--simulate", station, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["resources"]["nvidia.com/gpu"]["capacity"] == 4
    assert main(["explain", "--config", str(file), "--simulate", station]) == 0
    shown = " ".join(capsys.readouterr().out.split())  # a narrow terminal folds the reason
    assert "no pool selects it (gpu: it is a display card)" in shown


def test_every_simulated_model_is_healthy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each has shares; an integrated GPU has those of the memory that the file names."""
    file = tmp_path / "metagpu.yaml"
    file.write_text(
        "version: metagpu/v1\n"
        "pools: [{name: a, backends: [{backend: fraction, gpuMemory: 64Gi}]}]\n"
    )
    models = [model for model in GPU_MODELS.values() if not model.is_display]
    every = ",".join(model.key for model in models)
    assert main(["explain", "--config", str(file), "--simulate", every, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [gpu["healthy"] for gpu in report["gpus"]] == [True] * len(models)
    assert report["resources"]["cnvrg.io/metagpu"]["allocatable"] == 100 * len(models)
    assert [gpu["memoryMiB"] for gpu in report["gpus"]] == [
        model.memory or None for model in models
    ]


def test_explain_draws_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    """In text there is a table, without colours unless the output is a terminal."""
    assert main(["explain", "--simulate", "t4:1"]) == 0

    out = capsys.readouterr().out
    assert "Tesla T4" in out
    assert "cnvrg.io/metagpu" in out
    assert "\x1b" not in out


def test_explain_says_what_follows_from_too_much_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each pool of fractions or time-slices has its policy as it acts; MPS and MIG have none."""
    file = tmp_path / "policies.yaml"
    file.write_text(
        "version: metagpu/v1\npools:\n"
        "  - {name: strict, gpus: {index: 0}, memoryEnforcement: {policy: kill},\n"
        "     backends: [{backend: whole}, {backend: timeslice, replicas: 2}]}\n"
        "  - {name: tried, gpus: {index: 1}, memoryEnforcement: {policy: kill, dryRun: true},\n"
        "     backends: [{backend: fraction}]}\n"
        "  - {name: mps, gpus: {index: 2}, backends: [{backend: mps}]}\n"
        "  - {name: rest, backends: [{backend: fraction}]}\n"
        "  - {name: none, backends: [{backend: fraction}]}\n"
    )
    assert main(["explain", "--config", str(file), "--simulate", "t4:4", "--json"]) == 0
    policies = json.loads(capsys.readouterr().out)["memoryPolicies"]
    assert policies == {"strict": "kill", "tried": "dry-run", "rest": "warn"}

    assert main(["explain", "--config", str(file), "--simulate", "t4:4"]) == 0
    said = "memory above a share brings a warning, and nothing ends (policy warn)"
    shown = " ".join(capsys.readouterr().out.split())
    assert f"pool rest: {said}; compute is not limited" in shown


def test_explain_has_the_backends_of_an_idle_gpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """For a GPU of several backends the rule and each backend's offer are shown."""
    file = tmp_path / "mixed.yaml"
    file.write_text(
        "version: metagpu/v1\npools:\n"
        "  - {name: one, gpus: {index: 0}, backends: [{backend: whole}]}\n"
        "  - {name: two, backends: [{backend: timeslice, replicas: 4}, {backend: whole}]}\n"
    )
    assert main(["explain", "--config", str(file), "--simulate", "t4:3"]) == 0

    output = " ".join(capsys.readouterr().out.split())
    assert "4 gpu.shared" in output
    assert "GPU 1, 2: timeslice, whole share it. The first pod on an idle GPU chooses" in output
    assert "GPU 0" not in output


def test_explain_has_the_resource_slices(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pool of DRA shows what would be published; any other has no such table."""
    monkeypatch.setenv("COLUMNS", "160")  # the table has room for its longest cell
    file, options = tmp_path / "metagpu.yaml", ["explain", "--simulate", "t4:1"]
    file.write_text(
        "version: metagpu/v1\n"
        "pools: [{name: all, api: dra, backends: [{backend: fraction}, {backend: whole}]}]\n"
    )
    assert main([*options, "--config", str(file)]) == 0
    shown = capsys.readouterr().out
    assert "fraction.metagpu.io" in shown
    assert "shares: 1 to 100" in shown
    assert main([*options, "--config", str(file), "--json"]) == 0
    slices = json.loads(capsys.readouterr().out)["resourceSlices"]
    assert {found["driver"] for found in slices} == {"gpu.metagpu.io"}
    devices = [device for found in slices for device in found.get("devices", ())]
    kinds = [device["attributes"]["type"]["string"] for device in devices]
    assert kinds == ["fraction", "gpu", "monitor"]

    assert main([*options, "--json"]) == 0
    assert "resourceSlices" not in json.loads(capsys.readouterr().out)


def test_explain_draws_the_topology(capsys: pytest.CaptureFixture[str]) -> None:
    """`--topology` draws a matrix, and explains the words in the matrix alone."""
    assert main(["explain", "--simulate", "v100-16gb:8", "--topology"]) == 0

    out = capsys.readouterr().out
    assert " 7     SYS   SYS   SYS   NV1   NV2   NV1   NV2   X     1      0000:bd:00.0" in out
    assert "SYS   on different NUMA nodes" in out
    assert "PIX" not in out

    assert main(["explain", "--simulate", "v100-16gb:8"]) == 0
    assert "NV2" not in capsys.readouterr().out


def test_explain_has_the_topology_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    """In JSON each GPU has its PCI bus id and its peers, and the node its matrix."""
    assert main(["explain", "--simulate", "h100-80gb:2,t4:1", "--json"]) == 0

    report = json.loads(capsys.readouterr().out)
    assert [gpu["pciBusId"] for gpu in report["gpus"]] == [
        f"0000:{b}:00.0" for b in ("07", "0f", "47")
    ]
    assert [gpu["nvlinkPeers"] for gpu in report["gpus"]] == [[1], [0], []]
    assert report["topology"] == [
        ["X", "NV18", "NODE"],
        ["NV18", "X", "NODE"],
        ["NODE", "NODE", "X"],
    ]


def test_validate_has_line_and_path(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each wrong file has one line and status 1, and each good file is reported as good."""
    good, wrong = tmp_path / "good.yaml", tmp_path / "wrong.yaml"
    good.write_text(TWO_POOLS)
    wrong.write_text(TWO_POOLS.replace("sharesPerGpu", "sharePerGpu"))

    assert main(["validate", str(good)]) == 0
    assert main(["validate", str(good), str(wrong)]) == 1

    captured = capsys.readouterr()
    assert captured.out == f"{good}: good\n" * 2
    [line] = captured.err.splitlines()
    assert line.startswith(f"{wrong}: 5: pools[0].backends[0].sharePerGpu: unknown key; allowed:")
    assert line.endswith("did you mean sharesPerGpu?")


def test_validate_reads_stdin(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`-` is stdin, and an error there has its line."""
    given = b"version: metagpu/v1\npools: []\nunknown: 1\n"
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(given)))
    config_source._read_stdin.cache_clear()
    assert main(["validate", "-"]) == 1
    assert "-: 3: unknown: unknown key" in "".join(capsys.readouterr())


def test_validate_knows_the_kubelets_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A resource name that the kubelet refuses is refused here, with the rule (case 3)."""
    file = tmp_path / "name.yaml"
    file.write_text(TWO_POOLS.replace("example.com/big", "Example.com/big"))

    assert main(["validate", str(file)]) == 1
    assert "lower-case DNS name" in capsys.readouterr().err


def test_validate_builds_the_shares(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An error on any node, such as a duplicate id, is found without a node."""
    file = tmp_path / "twice.yaml"
    one = "{backend: fraction, resource: example.com/"
    file.write_text(f"version: metagpu/v1\npools: [{{name: a, backends: [{one}a}}, {one}b}}]}}]\n")

    assert main(["validate", str(file)]) == 1
    assert "would be offered twice" in capsys.readouterr().err


def test_bad_simulation_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """An unknown board is one line with the known gpu_models."""
    assert main(["explain", "--simulate", "a1000:8"]) == 1

    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "a100-40gb" in err


def test_no_daemon_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a daemon the error names the socket's path."""
    assert main(["status", "--run-dir", str(tmp_path)]) == 1
    assert f"no daemon answers on {tmp_path / 'metagpu.sock'}" in capsys.readouterr().err


@cache
def demo() -> Any:  # noqa: ANN401 - JSON
    """Run the demo, once for all tests, and return its output."""
    output = StringIO()
    with redirect_stdout(output):
        assert main(["demo", "--json"]) == 0
    return json.loads(output.getvalue())


def test_demo_isolates_a_fault() -> None:
    """The demo admits its pods, breaks one GPU, and shows that no other changes."""
    story = demo()
    pods = {pod["pod"]: pod for pod in story["pods"]}
    assert story["node"]["capacity"] == 800
    assert pods["metagpu-test"]["memoryMiB"] == 12288
    assert len(pods["train-large"]["gpus"]) == 2
    assert not pods["experiment"]["admitted"]
    assert story["fault"]["affected"] == [0]
    assert story["fault"]["allocatable"] < story["fault"]["allocatableBefore"] < 800
    assert len(story["fault"]["running"]) == 7


def test_demo_shows_the_owners_of_idle_gpus() -> None:
    """In the demo's mixed pool a GPU is claimed, released, and claimed by another backend."""
    names = ("nvidia.com/gpu.shared", "nvidia.com/gpu.mps", "nvidia.com/gpu")
    assert [
        (
            step["event"],
            [gpu["owner"] for gpu in step["gpus"]],
            [step["allocatable"][name] for name in names],
        )
        for step in demo()["pool"]["steps"]
    ] == [
        ("no pod yet", [None, None], [8, 200, 2]),
        ("lab requests 1 gpu.shared", ["timeslice", None], [8, 100, 1]),
        ("train requests 1 gpu", ["timeslice", "whole"], [4, 0, 1]),
        ("lab ends", [None, "whole"], [4, 100, 2]),
        ("serve requests 50 gpu.mps", ["mps", "whole"], [0, 100, 1]),
    ]


def test_demo_shows_exact_offers_beside_those_of_all_free_shares() -> None:
    """A pod that fits on no GPU waits, and is refused if all free shares count."""
    assert [
        (policy["offer"], [(outcome["free"], outcome["outcome"]) for outcome in policy["outcomes"]])
        for policy in demo()["offers"]
    ] == [("all", [(60, "is refused")]), ("exact", [(30, "waits"), (130, "runs")])]


def test_demo_ends_a_process_above_its_share() -> None:
    """A pod that grows above its share loses its largest process, and an Event says why."""
    growth = demo()["growth"]
    assert [step["gib"] for step in growth["steps"][-2:]] == [
        {"serve": 18, "notebook": 21},
        {"serve": 18, "notebook": 9},
    ]
    assert "its share is 20480 MiB" in growth["message"]


def test_demo_allocates_claims() -> None:
    """In the demo a claim of alternatives gets MIG devices while there are some, then shares."""
    gets = {claim["name"]: (claim["state"], claim["gets"]) for claim in demo()["claims"]["claims"]}
    assert gets == {
        "notebook": ("Prepared", "fraction (shares=50) of GPU 0"),
        "serve": ("Prepared", "mig-3g40gb-4 of GPU 1"),
        "train": ("Prepared", "mig-3g40gb-0 of GPU 1"),
        "tune": ("Prepared", "fraction (shares=25) of GPU 0"),
        "batch": ("Pending", "waits"),
    }


def test_demo_creates_and_removes_instances() -> None:
    """Each pod gets an instance where it costs others least; ended pods free slices."""
    steps = demo()["mig"]["steps"]
    profiles = ("1g.10gb", "2g.20gb", "3g.40gb", "7g.80gb")
    assert [
        (
            step["event"].partition(" ")[0],
            step["slices"][0],
            [step["allocatable"][f"nvidia.com/mig-{profile}"] for profile in profiles],
        )
        for step in steps
    ] == [
        ("no", [0, 0, 0, 0, 0, 0, 0, 0], [7, 3, 2, 1]),
        ("notebook", [0, 0, 0, 1, 0, 0, 0, 0], [7, 2, 1, 0]),
        ("serve", [2, 2, 0, 1, 0, 0, 0, 0], [5, 2, 1, 0]),
        ("train", [2, 2, 0, 1, 3, 3, 3, 3], [2, 1, 1, 0]),
        ("notebook", [2, 2, 0, 1, 3, 3, 3, 3], [2, 2, 1, 0]),  # it ends: its instance is warm
        ("serve", [2, 2, 0, 1, 3, 3, 3, 3], [4, 2, 2, 0]),
        ("finetune", [3, 3, 3, 3, 3, 3, 3, 3], [0, 0, 2, 0]),
    ]


def test_demo_draws_bars(capsys: pytest.CaptureFixture[str]) -> None:
    """In text the demo draws bars and names the fault; `make demo` runs the whole of it."""
    show_demo(demo())

    captured = capsys.readouterr()
    assert "██████████ 100/100" in captured.out
    assert "XID 79: GPU has fallen" in captured.out
    assert "serve requests 50 gpu.mps   mps         whole   0            100" in captured.out
    assert captured.err == ""


async def test_the_status_is_watched_as_mgctl_watches(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`-w` prints a line of JSON each second, and draws tables in place until Ctrl-C."""

    async def status(_: Mapping[str, Any]) -> object:
        return complete({}, StatusReport)

    async def watch(*options: str) -> int:
        interrupted_after(2, monkeypatch)
        async with control_server(tmp_path, {"status": status}):
            arguments = ["status", "-w", *options, "--run-dir", str(tmp_path)]
            return await to_thread.run_sync(main, arguments)

    assert await watch("-o", "json") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [json.loads(line)["gpus"] for line in lines] == [[], []]

    screen = TtyText()
    monkeypatch.setattr(sys, "stdout", screen)
    assert await watch() == 0
    assert screen.getvalue().count(CLEAR_SCREEN) == 2


# --- configurations -------------------------------------------------------------------------------

SEEDS = Path(__file__).parents[1] / "compat" / "files"
SLICES = SEEDS / "nvidia-time-slicing-config.yaml"


def test_a_config_map_of_nvidias_is_taken_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    """The manifest of CERN's notes, unmodified, gives 16 shares of four GPUs."""
    simulated = ("--simulate", "a100-40gb:4", "--json")
    assert main(["explain", "--config", str(SLICES), "--profile", "slice-4", *simulated]) == 0

    report = json.loads(capsys.readouterr().out)
    assert report["resources"] == {"nvidia.com/gpu.shared": {"capacity": 16, "allocatable": 16}}


def test_a_file_of_metagpus_is_taken_with_warnings(capsys: pytest.CaptureFixture[str]) -> None:
    """MetaGPU's own file gives 200 shares of two GPUs, with warnings for ignored settings."""
    file = SEEDS / "metagpu-config.yaml"
    assert main(["explain", "--config", str(file), "--simulate", "t4:2", "--json"]) == 0

    captured = capsys.readouterr()
    assert json.loads(captured.out)["resources"]["cnvrg.io/metagpu"]["capacity"] == 200
    assert captured.err.startswith(f"warning: {file}: 2: processesDiscoveryPeriod: has no effect")


def test_validate_names_the_format(capsys: pytest.CaptureFixture[str]) -> None:
    """Each file is reported with its format, and once for each choice left open."""
    assert main(["validate", str(SLICES)]) == 0
    assert capsys.readouterr().out == (
        f"{SLICES} [profile slice-4]: good: NVIDIA device plugin v1\n"
        f"{SLICES} [profile slice-10]: good: NVIDIA device plugin v1\n"
    )

    assert main(["validate", str(SLICES), "--profile", "slice-4"]) == 0
    assert capsys.readouterr().out == f"{SLICES}: good: NVIDIA device plugin v1\n"


WRONG = """\
version: metagpu/v1
health: {quietPeriod: soon}
pools:
- name: a
  gpus: {indx: 1}
  backends:
  - {backend: fraction, sharesPerGPU: 10}
  - {backend: nothing}
  - {backend: timeslice}
- name: b
  backends: [{backend: timeslice, replicas: 0}]
"""


def test_validate_finds_all_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every independent error of a file is printed at once, with its own line and path."""
    file = tmp_path / "metagpu.yaml"
    file.write_text(WRONG)

    assert main(["validate", str(file)]) == 1
    lines = [line.split(": ", 3) for line in capsys.readouterr().err.splitlines()]
    assert [(line, path) for _, line, path, _ in lines] == [
        ("2", "health.quietPeriod"),
        ("5", "pools[0].gpus.indx"),
        ("7", "pools[0].backends[0].sharesPerGPU"),
        ("8", "pools[0].backends[1].backend"),
        ("9", "pools[0].backends[2]"),
        ("11", "pools[1].backends[0].replicas"),
    ]


def test_validate_reports_unknown_keys_beside_errors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A misspelt key of a foreign file does not hide behind an error of the file."""
    file = tmp_path / "config.yaml"
    file.write_text("flags: {migStrategy: some, plugins: {}}")

    assert main(["validate", str(file)]) == 1
    error, warning = capsys.readouterr().err.splitlines()
    assert error.startswith(f"{file}: 1: flags.migStrategy: 'some' is unknown")
    assert warning == (
        f"warning: {file}: 1: flags.plugins: unknown key, has no effect; did you mean plugin?"
    )


def test_validate_prints_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With `-o json`, programs get every file and case with its errors and warnings."""
    file = tmp_path / "config.yaml"
    file.write_text("flags: {migStrategy: some, plugins: {}}")

    assert main(["validate", "-o", "json", str(file), str(SLICES)]) == 1
    wrong, *good = json.loads(capsys.readouterr().out)
    assert wrong["errors"] == [
        {
            "file": str(file),
            "line": 1,
            "path": "flags.migStrategy",
            "reason": "unknown_value",
            "problem": "'some' is unknown; allowed: mixed, none, single",
        }
    ]
    assert [warning["path"] for warning in wrong["warnings"]] == ["flags.plugins"]
    assert [(document["case"], document["good"], document["formats"]) for document in good] == [
        ("profile slice-4", True, ["NVIDIA device plugin v1"]),
        ("profile slice-10", True, ["NVIDIA device plugin v1"]),
    ]


SEVEN = "mig-configs: {seven: [{devices: all, mig-enabled: true, mig-devices: {1g.5gb: 7}}]}"


@pytest.mark.parametrize(
    ("texts", "good"),
    [
        (
            {
                "plugin": "flags: {migStrategy: mixed}\nsharing: {timeSlicing: {resources: "
                "[{name: nvidia.com/mig-1g.5gb, replicas: 2}]}}",
                "layouts": SEVEN,
            },
            ["plugin, layouts [layout seven]: good"],
        ),
        (
            {
                "nodes": 'nodeconfig: [{name: "a", operatingmode: mig}]',
                "devices": "nvidia: {resourceCountName: nvidia.com/gpu, deviceSplitCount: 10, "
                "migProfileAllowlist: [{models: [A30], profiles: [1g.6gb]}]}",
            },
            ["nodes, devices [node a]: good"],
        ),
        (
            {"a": SEVEN, "b": SEVEN},
            ["a [layout seven]: good", "b [layout seven]: good"],
        ),
    ],
)
def test_validate_judges_the_parts_of_one_configuration_together(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    texts: dict[str, str],
    good: list[str],
) -> None:
    """Files that `explain --config A --config B` reads together are no errors of each other."""
    monkeypatch.chdir(tmp_path)
    for name, text in texts.items():
        (tmp_path / name).write_text(text)

    assert main(["validate", *texts]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert [": ".join(each.split(": ")[:2]) for each in printed] == good


def test_explain_lists_the_layouts_of_the_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    """`--mig-config` needs no file where GPUs are known; a wrong name lists the right ones."""
    given = ["explain", "--simulate", "a30:1", "-o", "json", "--mig-config"]

    assert main([*given, "all-1g.6gb"]) == 0
    assert "nvidia.com/mig-1g.6gb" in json.loads(capsys.readouterr().out)["resources"]
    assert main([*given, "all-of-it"]) == 1
    assert json.loads(capsys.readouterr().err)["error"].endswith(
        "there is no layout 'all-of-it' (--mig-config); there are: all-disabled, all-enabled, "
        "all-balanced, all-1g.6gb, all-1g.6gb.me, all-2g.12gb, all-2g.12gb.me, all-4g.24gb"
    )
    unknown = ["--profile", "slice-4", "--mig-config", "all-1g.6gb"]
    assert main(["validate", str(SLICES), *unknown]) == 1
    assert "made from a node's GPUs" in capsys.readouterr().err


def test_validate_warns_once(capsys: pytest.CaptureFixture[str]) -> None:
    """A note for all nodes is printed once, and a file with notes is good."""
    assert main(["validate", str(SEEDS / "hami-device-config.yaml"), "--node-name", "nodeA"]) == 0

    captured = capsys.readouterr()
    assert captured.out.endswith("good: HAMi's device-config\n")
    assert [line.split(": ")[3] for line in captured.err.splitlines()] == [
        "nvidia.resourceMemoryName",
        "nvidia.resourceCoreName",
        "nodeconfig[0]",
    ]


def test_validate_of_a_source_without_profiles(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An empty directory, or a file that is no configuration, is one line and status 1."""
    assert main(["validate", str(tmp_path), str(tmp_path / "none")]) == 1

    empty, missing = capsys.readouterr().err.splitlines()
    assert empty.endswith(": there is no profile in it; put a configuration there")
    assert missing == f"{tmp_path}/none: cannot be read: No such file or directory"


def test_convert_prints_a_valid_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The output of `--convert` is a valid file of metagpu."""
    assert main(["validate", "--convert", str(SLICES), "--profile", "slice-10"]) == 0
    printed = capsys.readouterr().out
    ours = tmp_path / "ours.yaml"
    ours.write_text(printed)

    assert printed.startswith("version: metagpu/v1\npools:\n- name: gpu.shared\n")
    assert main(["validate", str(ours)]) == 0
    assert main(["validate", "--convert", str(ours)]) == 0
    assert capsys.readouterr().out == f"{ours}: good\n{printed}"


def test_convert_takes_files_together(capsys: pytest.CaptureFixture[str]) -> None:
    """Files that belong together are converted into one, as `run` reads them."""
    files = [str(SLICES), str(SEEDS / "nvidia-mig-config.yaml")]
    choice = ["--profile", "slice-4", "--mig-config", "disabled"]
    assert main(["validate", "--convert", *files, *choice]) == 0

    assert "resource: nvidia.com/gpu.shared" in capsys.readouterr().out


def test_convert_prints_an_unusable_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An unusable conversion is printed, with the reason and status 1."""
    file = tmp_path / "config.yaml"
    file.write_text("sharing: {timeSlicing: {resources: [{name: gpu, replicas: 0}]}}")

    assert main(["validate", "--convert", str(file)]) == 1
    captured = capsys.readouterr()
    assert "replicas: 0" in captured.out
    assert captured.err == (
        f"metagpu: {file}: 1: sharing.timeSlicing.resources[0].replicas: replicas is 0; allowed: 1 "
        "to 70000\n"
    )


def test_plan_compares_two_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a daemon `--from` is the old configuration, for simulated GPUs or the node's own."""
    old, new = tmp_path / "old.yaml", tmp_path / "new.yaml"
    old.write_text(TWO_POOLS)
    new.write_text(TWO_POOLS.replace("sharesPerGpu: 10", "sharesPerGpu: 20"))
    files = ["--from", str(old), "--config", str(new), "--simulate", "a100-40gb:1,t4:1"]
    assert main(["plan", *files, "--json"]) == 0

    report = json.loads(capsys.readouterr().out)
    assert [each["change"] for each in report["resources"].values()] == ["changed", "unchanged"]
    assert [each["change"] for each in report["gpus"]] == ["changed", "unchanged"]

    assert main(["plan", *files]) == 0
    out = capsys.readouterr().out
    assert "10 -> 20" in out
    assert "unchanged" in out


def test_plan_from_a_file_to_a_profile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--from` may be a plain file where the new configuration is a profile."""
    old = tmp_path / "old.yaml"
    old.write_text(TWO_POOLS)
    new = ["--config", str(SLICES), "--profile", "slice-4"]
    assert main(["plan", "--from", str(old), *new, "--simulate", "t4:1", "--json"]) == 0

    report = json.loads(capsys.readouterr().out)
    assert report["resources"]["nvidia.com/gpu.shared"]["after"] == 4
    assert report["gpus"][0]["backendsBefore"] == ["fraction"]


def test_plan_for_a_new_node(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On simulated GPUs without an old configuration everything is added."""
    new = tmp_path / "new.yaml"
    new.write_text(TWO_POOLS)
    assert main(["plan", "--config", str(new), "--simulate", "a100-40gb:1", "--json"]) == 0

    report = json.loads(capsys.readouterr().out)
    assert report["resources"]["example.com/big"]["change"] == "added"
    assert report["gpus"][0]["poolAfter"] == "big"


def test_plan_without_a_daemon_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a daemon `plan` fails with one line."""
    assert main(["plan", "--run-dir", str(tmp_path)]) == 1
    assert f"no daemon answers on {tmp_path / 'metagpu.sock'}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (
            ["--config-map", "a/b", "--node-name", "n"],
            "--config-map: a ConfigMap is read from the API server; also give --kubeconfig",
        ),
        (
            ["--cluster", "label"],
            (
                "--cluster: 'label' is not a feature of the API server; allowed: all, none, "
                "config, labels, free-labels, nodefeature, taint, condition, events, allocatable, "
                "pods, pod-events, competing-plugins, cordon, janitor, janitor-dry-run"
            ),
        ),
    ],
)
def test_impossible_uses_of_the_api_server_are_one_line(
    options: list[str],
    line: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An impossible value of `--cluster` is one line before anything starts."""
    for name in ("KUBECONFIG", "METAGPU_KUBECONFIG", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)

    assert main(["run", *options]) == 1
    assert capsys.readouterr().err == f"metagpu: {line}\n"
