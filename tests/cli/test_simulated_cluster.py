"""`metagpu run --with-kubelet` in one process, `metagpu sim` in others, as users have them."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import metagpu.plugins.cluster.client  # noqa: F401 - the plugin loads it in its event loop
from metagpu.cli import simulation
from metagpu.cli.metagpu import main
from metagpu.cli.mgctl import main as mgctl
from metagpu.core.devices.devices import gpu_of_device
from metagpu.kubectl.program import main as kubectl_metagpu
from metagpu.sim.allocation.pools import gather_pools
from metagpu.sim.commands import remote
from tests.e2e.rig.tools import Tools

pytestmark = pytest.mark.long

PAGE = Path(__file__).parents[2] / "docs" / "simulator.md"
METAGPU = "cnvrg.io/metagpu"
PROGRAMS = {"metagpu": main, "mgctl": mgctl}
SHOW = {"list", "pods", "doctor", "batch"}
"""The last words of commands in the tour that show, and change nothing."""
LIMIT = 120.0
"""Seconds for one wait. A daemon starts in one, but on a busy machine in many."""
TWO_POOLS = """\
version: metagpu/v1
pools:
  - {name: whole, gpus: {index: 0}, backends: [{backend: whole}]}
  - {name: slices, backends: [{backend: timeslice, replicas: 4}]}
"""


def command(line: str) -> tuple[int, str, str]:
    """Run a command line of one of the programs; return its status and what it printed."""
    out, err = StringIO(), StringIO()
    words = shlex.split(line.removeprefix("kubectl "))
    run = kubectl_metagpu if line.startswith("kubectl ") else PROGRAMS[words[0]]
    with redirect_stdout(out), redirect_stderr(err):
        status = run(words[1:])
    return status, out.getvalue(), err.getvalue()


@dataclass
class Node:
    """A running daemon with its simulated cluster, asked by command lines."""

    run_dir: Path

    @property
    def log(self) -> Path:
        """The daemon's log."""
        return self.run_dir / "log"

    def sim(self, line: str) -> str:
        """Run a command of `metagpu sim` that succeeds; return its output."""
        status, out, err = command(f"metagpu sim --run-dir {self.run_dir} {line}")
        assert status == 0, err
        return out.rstrip("\n")

    def fails(self, line: str) -> str:
        """Run a command of `metagpu sim` that is refused; return its one line."""
        status, out, err = command(f"metagpu sim --run-dir {self.run_dir} {line}")
        assert (status, out, err.count("\n")) == (1, "", 1)
        return err.rstrip("\n")

    def json(self, line: str) -> Any:  # noqa: ANN401 - JSON
        """Run a command and return its JSON."""
        return json.loads(self.sim(f"{line} -o json"))

    def kubectl(self, line: str, status: int = 0) -> str:
        """Run `kubectl metagpu` by the kubeconfig that the daemon wrote; return its output."""
        kubeconfig = self.run_dir / "cluster" / "kubeconfig"
        ended, out, err = command(f"kubectl metagpu {line} --kubeconfig {kubeconfig}")
        assert ended == status, out + err
        return out

    def pods(self) -> dict[str, str]:
        """Return the phase of each pod."""
        return {pod["name"]: pod["phase"] for pod in self.json("pod list")}

    def status(self) -> str:
        """Return what `metagpu status` prints."""
        return command(f"metagpu status --run-dir {self.run_dir}")[1]

    def allocatable(self) -> dict[str, int]:
        """Return the Node's allocatable numbers."""
        return {
            name: document["allocatable"]
            for name, document in self.json("node show")["resources"].items()
        }

    def serves(self) -> bool:
        """Return whether the Node has resources, and shares of each."""
        shown = self.allocatable().values()
        return bool(shown) and all(shown)


@contextmanager
def daemon(run_dir: Path, *arguments: str) -> Iterator[Node]:
    """Run `metagpu run` with a simulated cluster until the block ends, as by Ctrl-C."""
    options = ("--with-kubelet", "--run-dir", str(run_dir), "--log-format", "json")
    node = Node(run_dir)
    with node.log.open("w") as log:
        process = subprocess.Popen(  # noqa: S603 - our own program
            [sys.executable, "-m", "metagpu", "run", *options, *arguments], stderr=log
        )
    try:
        show = f"metagpu sim --run-dir {run_dir} node show"
        until(lambda: command(show)[0] == 0 or process.poll() is not None)
        until(lambda: node.serves() or "dra driver registered" in node.log.read_text())
        yield node
    finally:
        process.terminate()
        status = process.wait(timeout=LIMIT)
    assert status == 0, node.log.read_text()
    assert "Traceback" not in node.log.read_text()


def until(is_so: Any, period: float = 0.05) -> None:  # noqa: ANN401 - any predicate
    """Poll until a predicate holds; a daemon takes two new tokens of viewers a second."""
    deadline = time.monotonic() + LIMIT
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(period)


def tour() -> list[tuple[str, str]]:
    """Return the commands of the page's tour, each with the output that the page shows."""
    text = PAGE.read_text(encoding="utf-8")
    block = text[text.index("## A tour") :].split("```console\n", 1)[1].split("```", 1)[0]
    steps = [step.partition("\n") for step in block.split("$ ")[1:]]
    return [(line.partition(" #")[0].strip(), shown.rstrip("\n")) for line, _, shown in steps]


def matches(shown: str, printed: str) -> bool:
    """Return whether an output is as shown; `…` stands for any text, of several lines too."""
    return re.fullmatch(re.escape(shown).replace("…", "(?s:.*)"), printed) is not None


def test_the_tour_is_as_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each command of the tour prints what the page shows; lists may need a moment."""
    (first, _), (run, _), *steps = tour()
    variables = "METAGPU_RUN_DIR=/tmp/run KUBECONFIG=/tmp/run/cluster/kubeconfig"
    assert first == f"export PATH=$PWD/.venv/bin:$PATH {variables}"
    monkeypatch.setenv("METAGPU_RUN_DIR", str(tmp_path))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "cluster/kubeconfig"))
    monkeypatch.setenv("COLUMNS", "160")  # of a terminal as wide as the page
    words = shlex.split(run)
    assert (words[:2], words[-1]) == (["metagpu", "run"], "&")

    assert len(steps) >= 9
    with daemon(tmp_path, *(word for word in words[2:-1] if word != "--with-kubelet")):
        for line, shown in steps:
            if line.split()[-1] in SHOW:
                deadline = time.monotonic() + LIMIT
                while not matches(shown, printed := command(line)[1].rstrip("\n")):
                    assert time.monotonic() < deadline, f"{line}\n{printed}"
                    time.sleep(1)
                continue
            status, out, err = command(line)
            assert matches(shown, out.rstrip("\n")), f"{line}\n{out}{err}"
            assert status == 0


def test_a_command_waits_for_a_daemon_that_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tour may be pasted as a whole: `metagpu sim` finds a daemon that was just started."""

    def go_on(seconds: float) -> None:
        process.send_signal(signal.SIGCONT)
        time.sleep(seconds)

    clock = SimpleNamespace(monotonic=time.monotonic, sleep=go_on)
    monkeypatch.setattr(remote, "time", clock)
    show = f"metagpu sim --run-dir {tmp_path} show -o json"
    run = [sys.executable, "-m", "metagpu", "run", "--with-kubelet", "--run-dir", str(tmp_path)]
    process = subprocess.Popen([*run, "--simulate", "t4"])  # noqa: S603 - our own program
    process.send_signal(signal.SIGSTOP)  # until the command has found that it does not answer
    try:
        status, out, err = command(show)
        assert (status, len(json.loads(out or "{}").get("gpus", ()))) == (0, 1), err
        assert err.endswith("/metagpu.sock yet; waiting 30 s\n")
    finally:
        process.send_signal(signal.SIGCONT)
        process.terminate()
        process.wait(timeout=LIMIT)


def test_a_command_for_no_daemon_fails_at_once(tmp_path: Path) -> None:
    """Without one that starts there, the error says how to start one, or where another runs."""
    (other := tmp_path / "other").mkdir()
    show = f"metagpu sim --run-dir {tmp_path} show"
    status, _, err = command(show)
    assert status == 1
    assert "waiting" not in err
    assert f"no daemon runs in {tmp_path}; " in err

    with daemon(other, "--simulate", "t4"):
        status, _, err = command(show)
    assert (status, "waiting" in err) == (1, False)
    assert f"one runs with --run-dir {other}" in err


def test_a_whole_cluster_in_another_terminal(tmp_path: Path) -> None:
    """Pods of two resources, a kubelet that forgets, Events and profiles, without a cluster."""
    config = tmp_path / "metagpu.yaml"
    config.write_text(TWO_POOLS)
    arguments = ("--config", str(config), "--config-map", "kube-system/metagpu")
    with daemon(tmp_path, "--simulate", "driver=535.104.05,a100-40gb:2", *arguments) as node:
        until(lambda: node.allocatable() == {"nvidia.com/gpu": 1, "nvidia.com/gpu.shared": 4})
        assert node.sim("pod add a nvidia.com/gpu=1 --annotation k=v").endswith(
            "a is Running: nvidia.com/gpu=1 on GPU 0"
        )
        assert node.json("pod list")[0]["annotations"] == {"k": "v"}

        # A kubelet that forgets its pods takes their devices for free; metagpu keeps them held.
        node.sim("pod add b nvidia.com/gpu.shared=1 --namespace team")
        # What it forgets before metagpu has seen the holders, nobody knows.
        until(lambda: all(name in node.status() for name in ("default/a (main)", "team/b (main)")))
        assert node.sim("kubelet forget") == "the kubelet was restarted without its checkpoint"
        assert [pod["devices"] for pod in node.json("pod list")] == [{}, {}]
        assert node.pods() == {"a": "Running", "b": "Running"}
        until(lambda: "kubelet forgot devices" in node.log.read_text())
        assert "default/a (main)" in node.status()
        assert node.sim("pod end b --namespace team") == "pod b has ended"
        until(lambda: "team/b (main)" not in node.status())

        # A profile that the cluster chooses.
        profile = tmp_path / "fractions.yaml"
        profile.write_text(
            "version: metagpu/v1\npools: [{name: x, backends: [{backend: fraction}]}]\n"
        )
        node.sim(f"config-map kube-system/metagpu {profile}")
        node.sim("node label metagpu.io/config=fractions")
        until(lambda: METAGPU in node.allocatable())
        until(
            lambda: "ConfigApplied" in {document["reason"] for document in node.json("event list")}
        )


def test_pods_outlive_the_daemon(tmp_path: Path) -> None:
    """The next daemon finds the cluster as it was: pods with their shares, and labels."""
    with daemon(tmp_path, "--simulate", "t4:1") as node:
        node.sim(f"pod add train {METAGPU}=60")
        node.sim("node label team=vision")
        held = node.json("pod list")
        until(lambda: "default/train (main)" in node.status())

    with daemon(tmp_path, "--simulate", "t4:1") as node:
        assert node.json("pod list") == held
        until(lambda: "resource registered" in node.log.read_text())
        until(lambda: "default/train (main)" in node.status())
        assert node.json("node show")["labels"]["team"] == "vision"
        assert "Pending" in node.sim(f"pod add next {METAGPU}=60")
        node.sim("pod end next")
        node.sim("pod end train")
        until(lambda: "default/train (main)" not in node.status())
        until(lambda: node.allocatable()[METAGPU] == 100)
        assert "Running" in node.sim(f"pod add next {METAGPU}=60")


def test_what_cannot_be_is_one_line(tmp_path: Path) -> None:
    """Refused commands say in one line what is wrong."""
    with daemon(tmp_path, "--simulate", "t4:1") as node:
        node.sim(f"pod add train {METAGPU}=30")

        assert "pod train exists in namespace default" in node.fails(f"pod add train {METAGPU}=1")
        assert "there are: train" in node.fails("pod end tarin")
        assert "is not an extended resource" in node.fails("pod add x gpu=1")
        assert "no second plugin runs" in node.fails("plugin end")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--with-kubelet"], "also give --simulate"),
        (["--with-kubelet", "--simulate", "t4:1", "--take-over"], "leave out --take-over"),
        (
            ["--with-kubelet", "--simulate", "t4:1", "--kubelet-dir", "/tmp/x"],  # noqa: S108 - unused
            "leave out --kubelet-root, --kubelet-dir and --pod-resources",
        ),
        (
            ["--with-kubelet", "--simulate", "t4:1", "--kubelet-root", "/tmp/x"],  # noqa: S108 - unused
            "leave out --kubelet-root, --kubelet-dir and --pod-resources",
        ),
    ],
)
def test_a_simulated_kubelet_stands_alone(
    arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--with-kubelet` needs simulated GPUs, and takes no other kubelet's folder."""
    assert main(["run", *arguments]) == 1

    err = capsys.readouterr().err
    assert problem in err
    assert err.count("\n") == 1


def test_real_gpus_are_not_simulated_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The kubelet of a node with a driver gets no simulated GPUs, as by the chart's `simulate`."""
    (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06")
    monkeypatch.setattr(simulation, "_DRIVER", tmp_path / "version")
    monkeypatch.setenv("METAGPU_SIMULATE", "a100-40gb:8")
    assert main(["run", "--run-dir", str(tmp_path)]) == 1
    err = capsys.readouterr().err
    assert "--simulate: this node has an NVIDIA driver" in err
    assert "leave out --simulate (the chart's value simulate)" in err
    assert err.count("\n") == 1
    with daemon(tmp_path, "--simulate", "t4:1") as node:
        assert node.allocatable() == {METAGPU: 100}


DRA_PAGE = PAGE.with_name("dra.md")
CLAIMS = PAGE.parents[1] / "deploy" / "claims"
DRA_NODE = """\
gpus:
  - {model: a100-40gb, count: 5}
  - {model: a100-40gb, mig: true}
"""


def blocks_of(page: Path) -> list[str]:
    """Return the YAML blocks of a page."""
    return re.findall(r"```yaml\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


def claims(node: Node) -> dict[str, tuple[str, list[tuple[str, int]]]]:
    """Return the state and the devices of each claim, by its pods."""
    return {
        "+".join(document["pods"]): (
            document["state"],
            [(its["part"], its["gpu"]) for its in document["devices"]],
        )
        for document in node.json("claim list")
    }


FRACTION_REQUEST = {"name": "gpu", "exactly": {"deviceClassName": "fraction.metagpu.io"}}
CLAIMING_POD = {
    "resourceClaims": [{"name": "g", "resourceClaimTemplateName": "t"}],
    "containers": [{"name": "c", "image": "x", "resources": {"claims": [{"name": "g"}]}}],
}


def are_published(node: Node, count: int) -> bool:
    """Return whether the ResourceSlices of so many GPUs are written, and nothing is tainted."""
    objects = json.loads((node.run_dir / "cluster" / "objects.json").read_text())["objects"]
    found = gather_pools(
        [value for kind, _, _, value in objects if kind == "resourceslices"], "sim"
    )
    tainted = any(device.spec.get("taints") for device in found.devices)
    gpus = {gpu_of_device(device.id.device) for device in found.devices}
    return not (found.problems or tainted) and len(gpus) == count


def test_the_claims_of_the_page(tmp_path: Path) -> None:
    """The five claims of the page get their devices, and keep them over restarts."""
    config, manifest, *_ = blocks_of(DRA_PAGE)
    others = [CLAIMS / f"{name}.yaml" for name in ("ten-gib", "small-gpu", "two-gpus", "together")]
    (tmp_path / "metagpu.yaml").write_text(config.replace("      - {backend: mps}\n", ""))
    (tmp_path / "node.yaml").write_text(DRA_NODE)
    options = (
        "--config",
        f"{tmp_path / 'metagpu.yaml'}",
        "--simulate",
        f"{tmp_path / 'node.yaml'}",
    )
    with daemon(tmp_path, *options) as node:
        until(lambda: are_published(node, 6))
        (tmp_path / "half.yaml").write_text(manifest)
        for file in (tmp_path / "half.yaml", *others):
            assert node.sim(f"claim add -f {file}").startswith("created ")
        until(lambda: {state for state, _ in claims(node).values()} == {"Prepared"})
        before = claims(node)
        assert sorted(before) == ["first+second", "half", "pair", "small", "ten"]
        [[half], [ten], [small], [shared]] = (
            before[name][1] for name in ("half", "ten", "small", "first+second")
        )
        assert (half[0], shared[0]) == ("fraction", "timeslice")
        assert ten == ("fraction", 4)
        assert small[0].startswith("mig-2g10gb-")
        assert small[1] == 5
        assert {part for part, _ in before["pair"][1]} == {"gpu"}
        assert len({gpu for _, gpu in (half, shared, *before["pair"][1])}) == 4
        until(lambda: all(f"default/{name} (main)" in node.status() for name in ("half", "pair")))

        assert node.sim("kubelet restart") == "the kubelet was restarted"
        assert claims(node) == before

    with daemon(tmp_path, *options) as node:
        assert claims(node) == before
        until(lambda: "default/pair (main)" in node.status())
        assert node.sim("pod end first") == "pod first has ended"
        assert claims(node)["second"] == before["first+second"]
        assert node.sim("claim end together") == "claim together has ended"
        assert node.sim("pod end pair") == "pod pair has ended"
        until(lambda: claims(node).keys() == {"half", "ten", "small"})
        until(lambda: "default/pair (main)" not in node.status())


def test_a_claim_waits_for_the_end_of_another(tmp_path: Path) -> None:
    """The commands tell what became of a claim, and a claim that waits gets what another had."""
    (tmp_path / "metagpu.yaml").write_text(
        "version: metagpu/v1\npools: [{name: all, api: dra, backends: [{backend: whole}, "
        "{backend: fraction}]}]\n"
    )
    options = ("--config", f"{tmp_path / 'metagpu.yaml'}", "--simulate", "t4:1")
    with daemon(tmp_path, *options) as node:
        half = "--class fraction.metagpu.io --capacity shares=50"
        until(lambda: are_published(node, 1))
        prepared = "is Prepared: fraction (shares=50) of GPU 0"
        for name in "ac":
            assert node.sim(f"claim add {name} {half}") == f"claim {name} {prepared}"
        waits = "is Pending: 0/1 nodes are available: 1 cannot allocate all claims."
        assert node.sim("claim add b --class gpu.metagpu.io") == f"claim b {waits}"
        assert "resourceclaim a exists in namespace default" in node.fails(f"claim add a {half}")
        assert "no claim d in namespace default; there are: a, c, b" in node.fails("claim end d")
        for name in "ac":
            assert node.sim(f"claim end {name}") == f"claim {name} has ended"
        until(lambda: claims(node) == {"b": ("Prepared", [("gpu", 0)])})
        assert "all of GPU 0" in node.sim("claim list")


def test_several_pods_with_claims_at_once(tmp_path: Path) -> None:
    """Eight pods of one file get their claims, while the kubelet's file of claims is rewritten."""
    (tmp_path / "metagpu.yaml").write_text(
        "version: metagpu/v1\npools: [{name: all, api: dra, backends: [{backend: fraction}]}]\n"
    )
    parts: list[dict[str, Any]] = [
        {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaimTemplate"}
        | {"metadata": {"name": "t"}}
        | {"spec": {"spec": {"devices": {"requests": [FRACTION_REQUEST]}}}}
    ]
    parts += [
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": f"p{number}"}}
        | {"spec": CLAIMING_POD}
        for number in range(8)
    ]
    file = tmp_path / "pods.yaml"
    file.write_text("\n---\n".join(json.dumps(part) for part in parts))
    with daemon(
        tmp_path, "--config", f"{tmp_path / 'metagpu.yaml'}", "--simulate", "a100-40gb:8"
    ) as node:
        until(lambda: are_published(node, 8))
        assert node.sim(f"claim add -f {file}").startswith("created ")
        until(lambda: len(claims(node)) == 8)
        until(lambda: {state for state, _ in claims(node).values()} == {"Prepared"})


MANIFESTS = Path(__file__).parent / "manifests"
NVIDIAS = """\
version: metagpu/v1
dra: {driver: gpu.nvidia.com}
pools:
  - name: mig
    gpus: {index: "5-6"}
    api: dra
    backends: [{backend: mig, profiles: [1g.5gb, 2g.10gb, 3g.20gb]}]
  - name: all
    api: dra
    backends:
      - {backend: whole}
      - {backend: timeslice, replicas: 2, timeSlice: default}
      - {backend: mps}
"""
NVIDIAS_NODE = "gpus: [{model: a100-40gb, count: 5}, {model: a100-40gb, count: 2, mig: true}]"
TIME_SLICING = """\
version: v1
sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 4}]}}
"""


def phases_in(node: Node, namespace: str) -> dict[str, int]:
    """Return the number of a namespace's pods in each phase."""
    return Counter(
        document["phase"]
        for document in node.json("pod list")
        if document["namespace"] == namespace
    )


def test_the_manifests_of_nvidias_driver_run(tmp_path: Path) -> None:
    """Claims and `limits`, in each shape of its demos, get devices by `sim apply`."""
    (tmp_path / "metagpu.yaml").write_text(NVIDIAS)
    (tmp_path / "node.yaml").write_text(NVIDIAS_NODE)
    config, gpus = str(tmp_path / "metagpu.yaml"), str(tmp_path / "node.yaml")
    with daemon(tmp_path, "--config", config, "--simulate", gpus) as node:
        until(lambda: are_published(node, 7))
        for name, namespace, count in (
            ("gpu-each", "each", 2),
            ("pods-share", "together", 2),
            ("mig-parts", "parts", 2),
            ("strategies", "default", 1),
        ):
            assert node.sim(f"apply -f {MANIFESTS / name}.yaml").startswith("created ")
            until(lambda: phases_in(node, namespace) == {"Running": count})  # noqa: B023 - at once
        held = claims(node)
        assert {state for state, _ in held.values()} == {"Prepared"}
        of_gpus = [devices for _, devices in held.values() if devices[0][0] == "gpu"]
        assert sorted(map(len, of_gpus)) == [1, 1, 1, 2]
        assert len({gpu for devices in of_gpus for _, gpu in devices}) == 5
        parts = [devices for _, devices in held.values() if len(devices) == 4]
        assert [{gpu for _, gpu in part} for part in parts] in ([{5}, {6}], [{6}, {5}])

        again = node.sim(f"apply -f {MANIFESTS / 'mig-parts.yaml'}")
        assert again.startswith("unchanged namespace/parts, resourceclaimtemplate/slices, dep")
        for name in ("gpu-each", "pods-share", "mig-parts", "strategies"):
            assert node.sim(f"delete -f {MANIFESTS / name}.yaml").startswith("deleted ")
        until(lambda: (node.pods(), claims(node)) == ({}, {}))
        assert node.sim(f"apply -f {MANIFESTS / 'in-limits.yaml'}").startswith("created ")
        until(lambda: phases_in(node, "limits") == {"Running": 2})
        held = claims(node)
        assert {pod: len(devices) for pod, (_, devices) in held.items()} == {"gpus": 2, "part": 1}
        assert {state for state, _ in held.values()} == {"Prepared"}
        assert node.sim(f"delete -f {MANIFESTS / 'in-limits.yaml'}").startswith("deleted ")
        until(lambda: not claims(node))
        node.sim(f"apply -f {MANIFESTS / 'by-name.yaml'}")
        until(lambda: phases_in(node, "default") == {"Succeeded": 3})


def test_the_sample_pods_of_nvidias_plugin_run(tmp_path: Path) -> None:
    """Requests that stand in `limits` count, in every workload; the rest of a file is named."""
    (tmp_path / "plugin.yaml").write_text(TIME_SLICING)
    config = str(tmp_path / "plugin.yaml")
    with daemon(tmp_path, "--config", config, "--simulate", "t4:3") as node:
        said = node.sim(f"apply -f {MANIFESTS / 'samples.yaml'}")
        until(lambda: phases_in(node, "default") == {"Running": 9})
        assert "pod vector-add is Running: nvidia.com/gpu=1 on GPU " in said
        assert "not looked at here: cpu, memory" in said
        assert "nothing here acts on objects of the kind Service" in said
        assert node.json("node show")["resources"]["nvidia.com/gpu"]["requested"] == 9


def test_a_manifest_is_taken_as_a_whole(tmp_path: Path) -> None:
    """One wrong object, and nothing is created; the error has its file, line and place."""
    good = "apiVersion: v1\nkind: Pod\nmetadata: {name: a}\nspec: {containers: [{name: c}]}\n"
    file = tmp_path / "pods.yaml"
    with daemon(tmp_path, "--simulate", "t4:1") as node:
        for wrong, problem in (
            ("{kind: RayCluster, metadata: {name: r}}", "of the kind 'RayCluster'; taken are"),
            ("{kind: Pod, metadata: {name: b}, spec: {}}", "missing required field `containers`"),
            ("{kind: List, items: [{kind: Job, metadata: {name: b}}]}", "the spec of the Job b"),
        ):
            file.write_text(f"{good}---\n{wrong}\n")
            error = node.fails(f"apply -f {file}")
            assert f"{file}: 6: document 2" in error
            assert problem in error
        file.write_text(f"{good}---\n{good}")
        assert "pod a stands there twice" in node.fails(f"apply -f {file}")
        assert node.pods() == {}
        file.write_text(good)
        assert "pod a is Running" in node.sim(f"apply -f {file}")
        file.write_text(good.replace("name: c", "name: d"))
        assert "pod a exists with another spec; end it first" in node.fails(f"apply -f {file}")


def held_gpus(node: Node) -> list[int]:
    """Return the GPU of each container that holds shares, none while the daemon is silent."""
    get = f"kubectl metagpu get pods -o json --kubeconfig {node.run_dir}/cluster/kubeconfig"
    status, out, _ = command(get)
    return [] if status else [row["gpu"] for row in json.loads(out)["items"]]


def test_kubectl_metagpu_knows_the_simulated_cluster(tmp_path: Path) -> None:
    """The plugin finds the daemon's pod, asks it through the API server, and moves pods."""
    serve = tmp_path / "serve.yaml"
    pod = {"metadata": {"labels": {"app": "serve"}}, "spec": {"containers": [
        {"name": "main", "resources": {"limits": {METAGPU: "20"}}}
    ]}}  # fmt: skip
    serve.write_text(
        json.dumps({"kind": "Deployment", "metadata": {"name": "serve"}, "spec": {"template": pod}})
    )
    with daemon(tmp_path, "--simulate", "a100-40gb:2") as node:
        assert node.pods() == {}  # the daemon's own pod is the cluster's, not the user's
        node.sim(f"apply -f {serve}")
        assert "Unschedulable" in node.sim(f"pod add large {METAGPU}=190 --namespace team")
        until(lambda: held_gpus(node) == [0], 1)
        assert "sim    2 " in node.kubectl("top nodes")
        assert "it does not fit on sim" in node.kubectl("why large -n team", 1)
        assert "fits on node sim" in node.kubectl(f"fit -f {serve}")
        assert "cnvrg.io/metagpu   200" in node.kubectl("explain sim")
        assert "on 1 node" in node.kubectl("version")
        assert "problem" in node.kubectl("doctor")

        assert "is drained: nobody holds it" in node.kubectl("drain-gpu sim/0 --yes --reason fan")
        until(lambda: held_gpus(node) == [1], 1)
        assert "GPU 0 is cordoned: fan" in node.kubectl("get gpus")
        assert "gives new shares again" in node.kubectl("uncordon sim/0")

    with daemon(tmp_path, "--simulate", "a100-40gb:2") as node:  # on another port
        get = f"kubectl metagpu get nodes --kubeconfig {node.run_dir}/cluster/kubeconfig"
        until(lambda: "healthy" in command(get)[1], 1)


THREE_POLICIES = """\
version: metagpu/v1
pools:
  - name: report
    gpus: {index: 0}
    memoryEnforcement: {policy: report}
    backends: [{backend: fraction, resource: example.com/report}]
  - name: warn
    gpus: {index: 1}
    backends: [{backend: fraction, resource: example.com/warn}]
  - name: kill
    memoryEnforcement: {policy: kill}
    backends: [{backend: fraction, resource: example.com/kill}]
"""


def test_a_pod_over_its_share(tmp_path: Path) -> None:
    """A process in a pod is counted, shown and warned of, and ended where the policy is `kill`."""
    (tmp_path / "metagpu.yaml").write_text(THREE_POLICIES)
    config = str(tmp_path / "metagpu.yaml")
    with daemon(tmp_path, "--config", config, "--simulate", "a100-40gb:3") as node:
        for gpu, name in enumerate(("report", "warn", "kill")):
            node.sim(f"pod add {name} example.com/{name}=25")
            until(lambda name=name: f"default/{name} (main)" in node.status())
            line = node.sim(f"process start --pod {name} --memory 5Gi --load 40%")
            assert f"pod {name} (main) on GPU {gpu}: memory 5120 MiB, load 40 %" in line
        shown = node.json("process list")
        assert [(each["pod"], each["gpu"], each["load"]) for each in shown] == [
            ("report", 0, 40), ("warn", 1, 40), ("kill", 2, 40),
        ]  # fmt: skip

        for name in ("report", "warn", "kill"):
            node.sim(f"process start --pod {name} --memory 10Gi")
        until(lambda: [each["pod"] for each in node.json("process list")].count("kill") == 1)
        usage = json.loads(command(f"mgctl get pods --run-dir {tmp_path} -o json")[1])
        used = {each["pod"]: each["gpus"][0]["usedMiB"] for each in usage["containers"]}
        assert used == {"report": 15360, "warn": 15360, "kill": 5120}

        def reasons() -> set[tuple[str, str]]:
            return {(each["object"], each["reason"]) for each in node.json("event list")}

        expected = {
            ("Pod/default/warn", "GPUMemoryExceeded"),
            ("Pod/default/kill", "GPUMemoryExceeded"),
            ("Pod/default/kill", "GPUProcessSignaled"),
        }
        until(lambda: reasons() >= expected)
        assert ("Pod/default/report", "GPUMemoryExceeded") not in reasons()
        counters = command(f"kubectl metagpu get pods --kubeconfig {tmp_path}/cluster/kubeconfig")
        assert "15360/10240 MiB" in counters[1]

        assert node.sim("process end --pod warn") == "2 processes have ended in pod warn"
        assert "pod warn has no process" in node.fails("process end --pod warn")
        assert "metagpu: GPU 1 has" in node.fails("process start --pod warn --memory 99Gi")
        assert node.fails("process start 0 --pod warn") == "metagpu: pod warn sees no GPU 0"
        assert "no pod wran in namespace default" in node.fails("process start --pod wran")
        node.sim("pod end report")
        assert [each["pod"] for each in node.json("process list")] == ["kill"]
        assert node.sim("reboot") == "the node was rebooted"
        assert node.json("process list") == []
    assert "process list" not in node.log.read_text()


def test_processes_in_mig_devices_and_claims(tmp_path: Path) -> None:
    """A process runs on the device that its container sees, by a resource name or by a claim."""
    (tmp_path / "metagpu.yaml").write_text(
        "version: metagpu/v1\npools:\n"
        "  - {name: mig, gpus: {index: 0}, backends: [{backend: mig, profiles: [2g.10gb]}]}\n"
        "  - {name: claims, api: dra, backends: [{backend: mig, profiles: [3g.20gb]}]}\n"
    )
    (tmp_path / "node.yaml").write_text("gpus: [{model: a100-40gb, count: 2, mig: true}]")
    config, gpus = str(tmp_path / "metagpu.yaml"), str(tmp_path / "node.yaml")
    with daemon(tmp_path, "--config", config, "--simulate", gpus) as node:
        until(lambda: are_published(node, 1) and node.serves())
        assert "Running" in node.sim("pod add one nvidia.com/mig-2g.10gb=1")
        assert "Prepared" in node.sim("claim add two --class mig.metagpu.io")
        until(lambda: node.pods() == {"one": "Running", "two": "Running"})
        assert "on GPU 0: memory 3072 MiB" in node.sim("process start --pod one --memory 3Gi")
        assert "on GPU 1: memory unknown" in node.sim("process start --pod two")
        assert "GPU 0 has" in node.fails("process start --pod one --memory 9Gi")
        show = json.loads(command(f"metagpu sim --run-dir {tmp_path} show --json")[1])
        for gpu in show["gpus"]:
            [instance], [process] = gpu["instances"], gpu["processes"]
            assert process["gi"] == instance["gi"]


KUBECTL = Path(Tools.cached().path("kubectl"))


@pytest.mark.e2e
def test_kubectl_itself_reads_and_writes_the_cluster(tmp_path: Path) -> None:
    """Objects are applied, scaled, listed, described and deleted, with the simulator's checks."""
    (tmp_path / "plugin.yaml").write_text(TIME_SLICING)
    config = str(tmp_path / "plugin.yaml")
    options = ("--cache-dir", str(tmp_path))
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    variables = {"KUBECONFIG": str(tmp_path / "cluster/kubeconfig"), "PATH": path}

    def kubectl(line: str, text: str | None = None) -> str:
        # A plugin's name stands before all options.
        done = subprocess.run(  # noqa: S603 - the real program
            [str(KUBECTL), *line.split(), *(() if line.startswith("metagpu") else options)],
            input=text,
            env={**os.environ, **variables},
            capture_output=True,
            text=True,
            check=False,
        )
        return done.stdout + done.stderr

    with daemon(tmp_path, "--config", config, "--simulate", "t4:3") as node:
        samples = f"apply -f {MANIFESTS / 'samples.yaml'}"
        assert "deployment.apps/slicing-check created" in kubectl(samples)
        until(lambda: phases_in(node, "default") == {"Running": 9})
        assert kubectl(samples).count(" unchanged") == 5
        checks = kubectl("get pods -l app=slicing-check --no-headers")
        assert len(checks.splitlines()) == 5
        assert "unable to parse requirement: found 'app(in)'" in kubectl("get pods -l app(in)")
        assert "Controlled By:  StatefulSet/workers" in kubectl("describe pod workers-1")

        fewer = (MANIFESTS / "samples.yaml").read_text().replace("replicas: 5", "replicas: 1")
        assert "deployment.apps/slicing-check configured" in kubectl("apply -f -", fewer)
        until(lambda: phases_in(node, "default") == {"Running": 5})
        refused = kubectl("apply -f -", '{"apiVersion": "v1", "kind": "Pod", "metadata": '
            '{"name": "a"}, "spec": {}}')  # fmt: skip
        assert "the spec of the Pod a: Object missing required field `containers`" in refused
        plugin = kubectl("metagpu get pods --no-headers")
        assert len(plugin.splitlines()) == 5, plugin
        assert 'pod "notebook" deleted' in kubectl("delete pod notebook")
        kubectl(f"delete -f {MANIFESTS / 'samples.yaml'}")
        until(lambda: node.pods() == {})
