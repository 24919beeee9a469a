"""A daemon under churn for minutes: its memory, descriptors, threads, tasks and files stay flat.

Pods of all backends come and go, configurations change and are refused, the API server fails, the
kubelet restarts, and metrics are read. Each sample is a line of a CSV file. A figure whose least
value grows from the third to the last quarter is a failure.
"""

import argparse
import csv
import random
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import cycle
from pathlib import Path
from typing import Final

import aiohttp
import anyio

from metagpu.sim.apiserver.server import SimApiServer
from metagpu.sim.kubelet.kubelet import AdmissionError, KubeletDownError, SimKubelet, SimPod

NODE: Final = "soak"
GPUS: Final = "gpus:\n" + "".join(
    f"  - {{model: a100-40gb, mig: {str(number >= 6).lower()}}}\n" for number in range(8)
)
POOLS: Final = """\
version: metagpu/v1
health: {{quietPeriod: 100ms}}
pools:
  - {{name: f, gpus: {{index: [0, 1]}}, backends: [{{backend: fraction, sharesPerGpu: {shares}}}]}}
  - {{name: t, gpus: {{index: [2, 3]}}, backends: [{{backend: timeslice, replicas: {replicas}}}]}}
  - {{name: w, gpus: {{index: [4]}}, backends: [{{backend: whole}}]}}
  - {{name: m, gpus: {{index: [5]}}, backends: [{{backend: mps, replicas: 4}}]}}
  - name: g
    gpus: {{index: [6, 7]}}
    backends: [{{backend: mig, profiles: [1g.5gb, 2g.10gb, 3g.20gb], keepWarm: 1s}}]
"""
CONFIGS: Final = (
    *((100, 8), (100, 16), (50, 8), (100, 7000)),
    *((100, 60_000), (100, 100_000), (-1, 8)),  # refused
)
"""Shares of a GPU and replicas of a GPU, of each configuration."""
SAMPLE: Final = 10.0
"""Seconds between two samples."""
MOST_PODS: Final = 40
COLUMNS: Final = ("seconds", "memory", "descriptors", "threads", "tasks", "files")
GROWTH: Final = {"memory": 3.0, "descriptors": 4, "threads": 3, "tasks": 6, "files": 4}
"""The growth of each figure that is no leak; memory in MB."""
PROGRAM: Final = """\
import asyncio, os, sys, threading, time
from metagpu.cli.metagpu import main
file = sys.argv.pop(1)
def count():
    while True:
        time.sleep(2)
        try:
            tasks = len(list(asyncio.tasks._all_tasks))
        except RuntimeError:  # one began or ended meanwhile
            continue
        with open(file + ".new", "w") as out:
            out.write(str(tasks))
        os.replace(file + ".new", file)
threading.Thread(target=count, daemon=True).start()
sys.exit(main())
"""
"""The daemon, which writes the number of its tasks to a file."""


class Soak:
    """One node, and what happens to it."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.chance = random.Random(seed)  # noqa: S311 - a schedule
        self.kubelet = SimKubelet(folder / "dp", pod_resources=folder / "pr.sock")
        self.api = SimApiServer()
        self.pods: list[SimPod] = []
        self.counts = {"pods": 0, "refused": 0, "reloads": 0, "faults": 0, "scrapes": 0}
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = int(free.getsockname()[1])

    def command(self) -> list[str]:
        """Return the daemon's command."""
        options = {
            "--simulate": self.folder / "node.yaml",
            "--config": self.folder / "metagpu.yaml",
            "--run-dir": self.folder / "run",
            "--cdi-dir": self.folder / "cdi",
            "--kubelet-root": self.folder,
            "--kubelet-dir": self.folder / "dp",
            "--pod-resources": self.folder / "pr.sock",
            "--kubeconfig": self.api.kubeconfig(self.folder),
            "--cluster": "all",
            "--node-name": NODE,
            "--metrics": f"127.0.0.1:{self.port}",
            "--log-level": "error",
        }
        program = [sys.executable, "-c", PROGRAM, str(self.folder / "tasks"), "run"]
        return [*program, *(str(part) for option in options.items() for part in option)]

    def configure(self, shares: int, replicas: int) -> None:
        """Replace the configuration as a ConfigMap does."""
        fresh = self.folder / "new.yaml"
        fresh.write_text(POOLS.format(shares=shares, replicas=replicas))
        fresh.replace(self.folder / "metagpu.yaml")
        self.counts["reloads"] += 1

    # --- what happens -----------------------------------------------------------------------------

    async def churn(self) -> None:
        """Admit pods and end them."""
        while True:
            await anyio.sleep(self.chance.uniform(0.1, 0.7))
            with suppress(KubeletDownError):
                if len(self.pods) > self.chance.randrange(MOST_PODS):
                    await self._end(self.pods.pop(self.chance.randrange(len(self.pods))))
                else:
                    await self._begin()

    async def _begin(self) -> None:
        free = [name for name, count in self.kubelet.allocatable().items() if count]
        if not free:
            return
        resource = self.chance.choice(free)
        self.counts["pods"] += 1
        pod = SimPod.single(f"pod-{self.counts['pods']}", {resource: 1})
        add = self.api.add_pod
        add(pod.namespace, pod.name, NODE, uid=pod.uid, requests={resource: 1})
        try:
            await self.kubelet.admit(pod)
        except AdmissionError:
            self.counts["refused"] += 1
            self.api.delete_pod(pod.namespace, pod.name)
        else:
            self.pods.append(pod)

    async def _end(self, pod: SimPod) -> None:
        await self.kubelet.delete(pod)
        self.api.delete_pod(pod.namespace, pod.name)

    async def reload(self) -> None:
        """Change the configuration, also to one that is refused, and back."""
        for config in cycle(CONFIGS):
            await anyio.sleep(self.chance.uniform(5, 20))
            self.configure(*config)
            await anyio.sleep(self.chance.uniform(5, 10))
            self.configure(*CONFIGS[0])

    async def fail(self) -> None:
        """Make the API server refuse requests and end all watches."""
        while True:
            await anyio.sleep(self.chance.uniform(3, 9))
            self.api.fail(self.chance.choice((401, 410, 429, 500)), self.chance.randint(1, 4))
            self.api.end_watches()
            self.counts["faults"] += 1

    async def restart(self) -> None:
        """Restart the kubelet."""
        while True:
            await anyio.sleep(self.chance.uniform(60, 180))
            await self.kubelet.crash()
            await anyio.sleep(1)
            await self.kubelet.restart()

    async def scrape(self) -> None:
        """Read the metrics, as Prometheus does."""
        async with aiohttp.ClientSession() as session:
            while True:
                await anyio.sleep(5)
                with suppress(aiohttp.ClientError, TimeoutError):
                    async with session.get(f"http://127.0.0.1:{self.port}/metrics") as answer:
                        await answer.read()
                        self.counts["scrapes"] += 1

    def sample(self, pid: int, seconds: float) -> dict[str, float]:
        """Return what the daemon has now."""
        proc = Path(f"/proc/{pid}")
        status = dict(
            line.split(":", 1) for line in (proc / "status").read_text().splitlines() if ":" in line
        )
        counted = self.folder / "tasks"
        tasks = int(counted.read_text())
        counted.unlink()  # a count that is not renewed fails the next sample
        files = (file for name in ("run", "dp", "cdi", "tmp") for file in self._files(name))
        return {
            "seconds": round(seconds),
            "memory": round(int(status["VmRSS"].split()[0]) / 1000, 1),
            "descriptors": len(list((proc / "fd").iterdir())),
            "threads": int(status["Threads"]),
            "tasks": tasks,
            "files": len(list(files)),
        }

    def _files(self, name: str) -> Sequence[Path]:
        return list((self.folder / name).rglob("*"))


def growth(samples: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return by how much the least of each figure grew from the third quarter to the last."""
    quarter = len(samples) // 4
    third, last = samples[2 * quarter : 3 * quarter], samples[3 * quarter :]
    return {
        name: min(row[name] for row in last) - min(row[name] for row in third) for name in GROWTH
    }


def plot(samples: Sequence[Mapping[str, float]]) -> str:
    """Draw each figure over time, from 0 to its maximum, as an SVG picture."""
    width, height = 640, 70
    parts = []
    for number, name in enumerate(GROWTH):
        most = max(row[name] for row in samples) or 1
        end = samples[-1]["seconds"] or 1
        top = 20 + number * (height + 24)
        points = " ".join(
            f"{60 + sample['seconds'] / end * width:.1f},"
            f"{top + height * (1 - sample[name] / most):.1f}"
            for sample in samples
        )
        label = f"{name}{' (MB)' if name == 'memory' else ''}: at most {most:g}"
        parts += [
            f'<text x="60" y="{top - 5}">{label}</text>',
            f'<path d="M60 {top}v{height}h{width}" fill="none" stroke="#999"/>',
            f'<polyline points="{points}" fill="none" stroke="#2a78d6" stroke-width="1.5"/>',
        ]
    bottom = 20 + len(GROWTH) * (height + 24)
    parts.append(f'<text x="60" y="{bottom}">{samples[-1]["seconds"] / 60:.0f} minutes</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 {bottom + 10}" '
        'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="#fff"/>'
        f"{''.join(parts)}</svg>\n"
    )


async def run(folder: Path, minutes: float, seed: int, out: Path) -> int:
    """Run the soak; return 1 if a figure grows."""
    soak = Soak(folder, seed)
    samples: list[dict[str, float]] = []
    (folder / "node.yaml").write_text(GPUS)
    (folder / "tmp").mkdir()
    soak.configure(*CONFIGS[0])
    soak.api.add_node(NODE)
    async with soak.api.running(), soak.kubelet.running(), anyio.create_task_group() as group:
        process = await anyio.open_process(
            soak.command(), stdout=None, stderr=None, env={"TMPDIR": str(folder / "tmp")}
        )
        began = anyio.current_time()
        try:
            for act in (soak.churn, soak.reload, soak.fail, soak.restart, soak.scrape):
                group.start_soon(act)
            while (seconds := anyio.current_time() - began) < 60 * minutes:
                await anyio.sleep(SAMPLE)
                if process.returncode is not None:
                    print(f"the daemon ended with {process.returncode}", file=sys.stderr)  # noqa: T201
                    return 1
                samples.append(soak.sample(process.pid, seconds + SAMPLE))
                print(samples[-1], soak.counts, flush=True)  # noqa: T201 - a command line speaks so
        finally:
            group.cancel_scope.cancel()
            if process.returncode is None:
                process.terminate()
                with anyio.CancelScope(shield=True):
                    await process.wait()
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("w", newline="") as file:
        table = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        table.writeheader()
        table.writerows(samples)
    out.with_suffix(".svg").write_text(plot(samples))
    grown = {name: by for name, by in growth(samples).items() if by > GROWTH[name]}
    print(f"{soak.counts}; grown: {grown or 'nothing'}")  # noqa: T201 - as above
    return 1 if grown else 0


def main() -> int:
    """Run for the minutes asked for."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("dist/soak.csv"))
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="soak-", dir="/tmp") as folder:
        return anyio.run(run, Path(folder), asked.minutes, asked.seed, asked.out)


if __name__ == "__main__":
    sys.exit(main())
