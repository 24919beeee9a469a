"""What a person at a terminal gets: help, reports, errors, exit statuses."""

import json
from contextlib import redirect_stdout
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from metagpu.cli import main
from metagpu.plugins.cluster.settings import Feature

COMMANDS = (
    *("run", "demo", "explain", "validate", "plan", "status"),
    *("acknowledge", "cordon", "uncordon", "sim"),
)
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


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Every command's help ends with an example that begins with the command."""
    with pytest.raises(SystemExit) as end:
        main([command, "--help"])

    assert end.value.code == 0
    assert f"example:\n  metagpu {command}" in capsys.readouterr().out


def test_help_names_every_use_of_the_api_server(capsys: pytest.CaptureFixture[str]) -> None:
    """What `--cluster` takes is in its help, so that nobody has to guess a name."""
    with pytest.raises(SystemExit):
        main(["run", "--help"])

    told = "".join(capsys.readouterr().out.split())  # lines are broken within names, at a hyphen
    assert f"of{','.join(Feature)};all,-taintleavesoneout" in told


def test_unknown_command_is_misuse(capsys: pytest.CaptureFixture[str]) -> None:
    """A command that does not exist ends with status 2 and names those that do."""
    with pytest.raises(SystemExit) as end:
        main(["frobnicate"])

    assert end.value.code == 2
    assert "allowed: run, demo, explain, " in capsys.readouterr().err


def test_explain_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a file, eight GPUs are 800 shares of cnvrg.io/metagpu, all in one pool."""
    assert main(["explain", "--simulate", "a100-40gb:8", "--json"]) == 0

    told = json.loads(capsys.readouterr().out)
    assert told["resources"] == {"cnvrg.io/metagpu": {"capacity": 800, "allocatable": 800}}
    assert [gpu["index"] for gpu in told["gpus"]] == list(range(8))
    assert {(gpu["pool"], gpu["why"]) for gpu in told["gpus"]} == {("all", "all GPUs")}


def test_explain_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each GPU is told its pool and the reason, or why no pool has it."""
    file = tmp_path / "two.yaml"
    file.write_text(TWO_POOLS)

    simulated = "a100-40gb:1,t4:1,a30:1"
    assert main(["explain", "--config", str(file), "--simulate", simulated, "--json"]) == 0

    told = json.loads(capsys.readouterr().out)
    big, small, neither = told["gpus"]
    assert told["resources"]["example.com/big"]["capacity"] == 10
    assert told["resources"]["example.com/small"]["capacity"] == 15
    assert big["pool"] == "big"
    assert small["pool"] == "small"
    assert neither["pool"] is None
    assert "big: " in neither["why"]
    assert "small: " in neither["why"]


def test_explain_tells_of_a_pool_without_gpus(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever expects GPUs in a pool reads why there are none."""
    file = tmp_path / "two.yaml"
    file.write_text(TWO_POOLS)

    assert main(["explain", "--config", str(file), "--simulate", "a100-40gb:2"]) == 0
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "",
        "pool small has no GPU here: NVIDIA A100-SXM4-40GB does not match *T4*",
    ]


def test_explain_draws_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    """For people there is a table, without colours where no terminal listens."""
    assert main(["explain", "--simulate", "t4:1"]) == 0

    out = capsys.readouterr().out
    assert "Tesla T4" in out
    assert "cnvrg.io/metagpu" in out
    assert "\x1b" not in out


def test_explain_says_whom_an_idle_gpu_goes_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where several backends offer a GPU, the rule is told, and what each of them offers."""
    file = tmp_path / "mixed.yaml"
    file.write_text(
        "version: metagpu/v1\npools:\n"
        "  - {name: one, gpus: {index: 0}, backends: [{backend: whole}]}\n"
        "  - {name: two, backends: [{backend: timeslice, replicas: 4}, {backend: whole}]}\n"
    )
    assert main(["explain", "--config", str(file), "--simulate", "t4:3"]) == 0

    told = " ".join(capsys.readouterr().out.split())
    assert "4 gpu.shared" in told
    assert "GPU 1, 2: offered by timeslice, whole. An idle GPU goes to the one that" in told
    assert "GPU 0" not in told


def test_explain_draws_how_gpus_are_connected(capsys: pytest.CaptureFixture[str]) -> None:
    """Asked for the topology it draws a matrix, and explains the words that are in it alone."""
    assert main(["explain", "--simulate", "v100-16gb:8", "--topology"]) == 0

    out = capsys.readouterr().out
    assert " 7     SYS   SYS   SYS   NV1   NV2   NV1   NV2   X     1      0000:bd:00.0" in out
    assert "SYS   on different NUMA nodes" in out
    assert "PIX" not in out

    assert main(["explain", "--simulate", "v100-16gb:8"]) == 0
    assert "NV2" not in capsys.readouterr().out


def test_explain_tells_programs_how_gpus_are_connected(capsys: pytest.CaptureFixture[str]) -> None:
    """In JSON each GPU has its PCI bus id and its peers, and the node its matrix."""
    assert main(["explain", "--simulate", "h100-80gb:2,t4:1", "--json"]) == 0

    told = json.loads(capsys.readouterr().out)
    assert [gpu["pciBusId"] for gpu in told["gpus"]] == [
        f"0000:{b}:00.0" for b in ("07", "0f", "47")
    ]
    assert [gpu["nvlinkPeers"] for gpu in told["gpus"]] == [[1], [0], []]
    assert told["topology"] == [["X", "NV18", "NODE"], ["NV18", "X", "NODE"], ["NODE", "NODE", "X"]]


def test_validate_tells_line_and_path(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each wrong file gets one line, good ones are said to be good, and the status is 1."""
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


def test_validate_knows_the_kubelets_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A resource name that the kubelet would refuse is refused here, with the rule (case 3)."""
    file = tmp_path / "name.yaml"
    file.write_text(TWO_POOLS.replace("example.com/big", "Example.com/big"))

    assert main(["validate", str(file)]) == 1
    assert "lower-case DNS name" in capsys.readouterr().err


def test_validate_tries_the_cut(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What would go wrong on any node, such as one id offered twice, is told without a node."""
    file = tmp_path / "twice.yaml"
    one = "{backend: fraction, resource: example.com/"
    file.write_text(f"version: metagpu/v1\npools: [{{name: a, backends: [{one}a}}, {one}b}}]}}]\n")

    assert main(["validate", str(file)]) == 1
    assert "would be offered twice" in capsys.readouterr().err


def test_bad_simulation_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """A board that does not exist is answered with those that do."""
    assert main(["explain", "--simulate", "a1000:8"]) == 1

    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "a100-40gb" in err


def test_no_daemon_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Asking a daemon that is not there says where it was looked for."""
    assert main(["status", "--run-dir", str(tmp_path)]) == 1
    assert f"no daemon answers on {tmp_path / 'metagpu.sock'}" in capsys.readouterr().err


@cache
def demo() -> Any:  # noqa: ANN401 - JSON
    """Run the demo, once for all tests, and give what it tells."""
    told = StringIO()
    with redirect_stdout(told):
        assert main(["demo", "--json"]) == 0
    return json.loads(told.getvalue())


def test_demo_tells_its_story() -> None:
    """The demo admits its pods, breaks one GPU, and shows that no other was touched."""
    story = demo()
    pods = {pod["pod"]: pod for pod in story["pods"]}
    assert story["node"]["capacity"] == 800
    assert pods["metagpu-test"]["memoryMiB"] == 12288
    assert len(pods["train-large"]["gpus"]) == 2
    assert not pods["experiment"]["admitted"]
    assert story["fault"]["touched"] == [0]
    assert story["fault"]["allocatable"] == 700
    assert len(story["fault"]["running"]) == 7


def test_demo_shows_whom_idle_gpus_go_to() -> None:
    """In its mixed pool a GPU is claimed, given back, and taken in another way."""
    names = ("nvidia.com/gpu.shared", "nvidia.com/gpu.mps", "nvidia.com/gpu")
    assert [
        (
            step["what"],
            [gpu["owner"] for gpu in step["gpus"]],
            [step["allocatable"][name] for name in names],
        )
        for step in demo()["pool"]["steps"]
    ] == [
        ("nobody has asked yet", [None, None], [8, 200, 2]),
        ("lab asks for 1 gpu.shared", ["timeslice", None], [8, 100, 1]),
        ("train asks for 1 gpu", ["timeslice", "whole"], [4, 0, 1]),
        ("lab ends", [None, "whole"], [4, 100, 2]),
        ("serve asks for 50 gpu.mps", ["mps", "whole"], [0, 100, 1]),
    ]


def test_demo_shows_instances_come_and_go() -> None:
    """Each pod gets an instance where it costs the others least; who ends makes room."""
    steps = demo()["mig"]["steps"]
    profiles = ("1g.10gb", "2g.20gb", "3g.40gb", "7g.80gb")
    assert [
        (
            step["what"].partition(" ")[0],
            step["slices"][0],
            [step["allocatable"][f"nvidia.com/mig-{profile}"] for profile in profiles],
        )
        for step in steps
    ] == [
        ("nobody", [0, 0, 0, 0, 0, 0, 0, 0], [7, 3, 2, 1]),
        ("notebook", [0, 0, 0, 0, 0, 0, 1, 0], [7, 3, 1, 0]),
        ("serve", [0, 0, 0, 0, 2, 2, 1, 0], [5, 3, 1, 0]),
        ("train", [3, 3, 3, 3, 2, 2, 1, 0], [1, 1, 1, 0]),
        ("notebook", [3, 3, 3, 3, 2, 2, 1, 0], [1, 1, 1, 0]),  # it ends: its instance is warm
        ("serve", [3, 3, 3, 3, 2, 2, 1, 0], [3, 1, 2, 0]),
        ("finetune", [3, 3, 3, 3, 3, 3, 3, 3], [0, 0, 2, 0]),
    ]


def test_demo_draws_its_story(capsys: pytest.CaptureFixture[str]) -> None:
    """For people the demo draws bars and names the fault."""
    assert main(["demo"]) == 0

    captured = capsys.readouterr()
    assert "██████████ 100/100" in captured.out
    assert "XID 79: GPU has fallen" in captured.out
    assert "serve asks for 50 gpu.mps   mps         whole   0            100" in captured.out
    assert captured.err == ""


# --- configurations -------------------------------------------------------------------------------

SEEDS = Path(__file__).parent / "compat" / "files"
SLICES = SEEDS / "nvidia-time-slicing-config.yaml"


def test_a_config_map_of_nvidias_is_taken_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    """The manifest of CERN's notes, unmodified, makes 16 of four GPUs."""
    simulated = ("--simulate", "a100-40gb:4", "--json")
    assert main(["explain", "--config", str(SLICES), "--profile", "slice-4", *simulated]) == 0

    told = json.loads(capsys.readouterr().out)
    assert told["resources"] == {"nvidia.com/gpu.shared": {"capacity": 16, "allocatable": 16}}


def test_a_file_of_metagpus_is_taken_with_warnings(capsys: pytest.CaptureFixture[str]) -> None:
    """MetaGPU's shipped file makes 200 of two GPUs; what has no effect is told on stderr."""
    file = SEEDS / "metagpu-config.yaml"
    assert main(["explain", "--config", str(file), "--simulate", "t4:2", "--json"]) == 0

    captured = capsys.readouterr()
    assert json.loads(captured.out)["resources"]["cnvrg.io/metagpu"]["capacity"] == 200
    assert captured.err.startswith(f"warning: {file}: 2: processesDiscoveryPeriod: has no effect")


def test_validate_says_the_format(capsys: pytest.CaptureFixture[str]) -> None:
    """Each file is told with its format, and once for each choice that nobody made."""
    assert main(["validate", str(SLICES)]) == 0
    assert capsys.readouterr().out == (
        f"{SLICES} [profile slice-4]: good: NVIDIA device plugin v1\n"
        f"{SLICES} [profile slice-10]: good: NVIDIA device plugin v1\n"
    )

    assert main(["validate", str(SLICES), "--profile", "slice-4"]) == 0
    assert capsys.readouterr().out == f"{SLICES}: good: NVIDIA device plugin v1\n"


def test_validate_warns_once(capsys: pytest.CaptureFixture[str]) -> None:
    """A note that holds for all nodes is told once, and a file with notes is good."""
    assert main(["validate", str(SEEDS / "hami-device-config.yaml"), "--node-name", "nodeA"]) == 0

    captured = capsys.readouterr()
    assert captured.out.endswith("good: HAMi's device-config\n")
    assert [line.split(": ")[3] for line in captured.err.splitlines()] == [
        "nvidia.resourceMemoryName",
        "nvidia.resourceCoreName",
    ]


def test_validate_of_an_open_choice_that_cannot_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A directory that is empty, or a file that is none, is one line and status 1."""
    assert main(["validate", str(tmp_path), str(tmp_path / "none")]) == 1

    empty, missing = capsys.readouterr().err.splitlines()
    assert empty.endswith(": there is no profile in it; put a configuration there")
    assert missing == f"{tmp_path}/none: cannot be read: No such file or directory"


def test_convert_prints_what_loads_as_ours(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What `--convert` prints is a file that metagpu takes."""
    assert main(["validate", "--convert", str(SLICES), "--profile", "slice-10"]) == 0
    printed = capsys.readouterr().out
    ours = tmp_path / "ours.yaml"
    ours.write_text(printed)

    assert printed.startswith("version: metagpu/v1\npools:\n- name: gpu.shared\n")
    assert main(["validate", str(ours)]) == 0
    assert main(["validate", "--convert", str(ours)]) == 0
    assert capsys.readouterr().out == f"{ours}: good\n{printed}"


def test_convert_takes_files_together(capsys: pytest.CaptureFixture[str]) -> None:
    """Files that belong together are converted into one, as `run` would take them."""
    files = [str(SLICES), str(SEEDS / "nvidia-mig-config.yaml")]
    choice = ["--profile", "slice-4", "--mig-config", "disabled"]
    assert main(["validate", "--convert", *files, *choice]) == 0

    assert "resource: nvidia.com/gpu.shared" in capsys.readouterr().out


def test_convert_prints_what_cannot_be_loaded_here(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A conversion is printed also if it cannot be used, and why not is told with status 1."""
    file = tmp_path / "config.yaml"
    file.write_text("sharing: {timeSlicing: {resources: [{name: gpu, replicas: 0}]}}")

    assert main(["validate", "--convert", str(file)]) == 1
    captured = capsys.readouterr()
    assert "replicas: 0" in captured.out
    assert captured.err == (
        f"metagpu: {file}: 1: sharing.timeSlicing.resources[0]: replicas is 0; allowed: 1 to "
        "100000\n"
    )


def test_plan_compares_two_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a daemon `--from` is what runs, on simulated GPUs or the node's own."""
    old, new = tmp_path / "old.yaml", tmp_path / "new.yaml"
    old.write_text(TWO_POOLS)
    new.write_text(TWO_POOLS.replace("sharesPerGpu: 10", "sharesPerGpu: 20"))
    files = ["--from", str(old), "--config", str(new), "--simulate", "a100-40gb:1,t4:1"]
    assert main(["plan", *files, "--json"]) == 0

    told = json.loads(capsys.readouterr().out)
    assert [each["change"] for each in told["resources"].values()] == ["changed", "untouched"]
    assert [each["change"] for each in told["gpus"]] == ["changed", "untouched"]

    assert main(["plan", *files]) == 0
    out = capsys.readouterr().out
    assert "10 -> 20" in out
    assert "untouched" in out


def test_plan_from_a_file_to_a_profile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is compared with may be a plain file where the new configuration is a profile."""
    old = tmp_path / "old.yaml"
    old.write_text(TWO_POOLS)
    new = ["--config", str(SLICES), "--profile", "slice-4"]
    assert main(["plan", "--from", str(old), *new, "--simulate", "t4:1", "--json"]) == 0

    told = json.loads(capsys.readouterr().out)
    assert told["resources"]["nvidia.com/gpu.shared"]["after"] == 4
    assert told["gpus"][0]["backendsBefore"] == ["fraction"]


def test_plan_for_a_new_node(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On simulated GPUs where nothing runs everything is added."""
    new = tmp_path / "new.yaml"
    new.write_text(TWO_POOLS)
    assert main(["plan", "--config", str(new), "--simulate", "a100-40gb:1", "--json"]) == 0

    told = json.loads(capsys.readouterr().out)
    assert told["resources"]["example.com/big"]["change"] == "added"
    assert told["gpus"][0]["poolAfter"] == "big"


def test_plan_without_a_daemon_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where no daemon runs, `plan` says so."""
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
                "--cluster: 'label' is no use of the API server; allowed: all, none, config, "
                "labels, nodefeature, taint, condition, events, allocatable, pods, pod-events, "
                "rivals"
            ),
        ),
    ],
)
def test_uses_of_the_api_server_that_cannot_be_are_one_line(
    options: list[str],
    line: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What an operator asks of the API server and cannot have is told before anything starts."""
    for name in ("KUBECONFIG", "METAGPU_KUBECONFIG", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)

    assert main(["run", *options]) == 1
    assert capsys.readouterr().err == f"metagpu: {line}\n"
