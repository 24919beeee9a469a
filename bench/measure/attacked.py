"""Allocate while a hostile process sends descriptors to the socket of `mgctl` in containers."""

import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from bench import client, daemon
from bench.figures import Figure, Samples
from bench.plan import Plan
from tests.rigs.attack import ATTACKER

_BEFORE_6_16: Final = (
    "-c",
    (
        "from metagpu.cli.metagpu import main\n"
        "from metagpu.plugins.pod_api.server import PodMgctlServer\n"
        "from metagpu.plugins.pod_api.socket import PodSocketLimits\n"
        "PodMgctlServer.limits = PodSocketLimits(passrights=9999); exit(main())"
    ),
)
"""A daemon that leaves SO_PASSRIGHTS alone: the descriptors arrive, as on an older kernel."""
_DESCRIPTORS: Final = 253
"""The most that one message carries."""
_PAUSE: Final = 0.005
_NAME: Final = "Allocate, 1 id, while descriptors that linger arrive"


def attacked(plan: Plan) -> list[Figure]:
    """Time Allocate while one attacker after the other sends what takes a day to close."""
    samples, over = Samples(), threading.Event()
    sent: list[str] = []

    with ExitStack() as stack:
        folder = stack.enter_context(daemon.folder())
        folder.chmod(0o755)
        subject = stack.enter_context(
            daemon.start(folder, config=daemon.POOL.format(shares=100), program=_BEFORE_6_16)
        )
        plugin = stack.enter_context(client.connected(subject.socket))
        request = client.allocate_request(client.ids_in(plugin.first_list())[:1])
        while not subject.pod_socket.exists():
            time.sleep(0.01)

        def attack() -> None:
            for number in range(plan.count(100, 5)):
                if number % 20 == 0:
                    plan.report(f"attacked: {number}")
                sent.append(_attack(subject.pod_socket))
            over.set()

        attacking = threading.Thread(target=attack)
        attacking.start()
        while not over.wait(_PAUSE):
            began = time.perf_counter()
            plugin.allocate(request)
            samples.seconds.append(time.perf_counter() - began)
        attacking.join()
    assert set(sent) == {"sent"}, sent
    return [samples.figure(_NAME, target=50), samples.worst(f"{_NAME}, worst")]


def _attack(socket: Path) -> str:
    """Attack once, by a process of the user nobody that is gone afterwards."""
    command = [sys.executable, "-I", "-S", str(ATTACKER), "linger", str(socket), str(_DESCRIPTORS)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(b"\n")
            process.stdin.flush()
            return process.stdout.readline().decode().strip()
        finally:
            process.kill()
