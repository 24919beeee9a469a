"""Opaque parameters are taken and refused as by NVIDIA's DRA driver, with the same limits.

`nvidia-claim-answers.jsonl.gz` has 928 random parameters of a claim with the GPU GPU-aaaa. For each
it says whether the driver's own decoder and checks (kubernetes-sigs/dra-driver-nvidia-gpu of
2026-08-07, gates TimeSlicingSettings and MPSSupport on) take them, and the limits of MPS clients:
`threads` in percent, `memory` in MiB. `panic`: that code ends there. Asked on 2026-11-29.
"""

import gzip
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from metagpu.compat.nvidia_claims import read_sharing
from metagpu.core.config.errors import ConfigError
from metagpu.core.model.resource_claims import AllocatedPart, MpsLimits, OpaqueParameters

_FILE: Final = Path(__file__).with_name("nvidia-claim-answers.jsonl.gz")
ANSWERS: Final[list[dict[str, Any]]] = [
    msgspec.json.decode(line) for line in gzip.decompress(_FILE.read_bytes()).splitlines()
]


def read(parameters: Mapping[str, Any]) -> tuple[bool, MpsLimits | None]:
    """Return whether metagpu takes parameters, and the limits of MPS clients."""
    kind = "mig" if parameters["kind"] == "MigDeviceConfig" else "gpu"
    device = AllocatedPart("r", kind, "GPU-aaaa")
    try:
        [found] = read_sharing([OpaqueParameters(parameters, (), from_class=False)], [device])
    except ConfigError:
        return False, None
    is_mps = found is not None and found.backend == "mps"
    return True, MpsLimits.parse(found.settings) if found is not None and is_mps else None


def is_documented(answer: Mapping[str, Any]) -> bool:
    """Return whether docs/dra.md says that an answer differs here."""
    parameters = answer["parameters"]
    written = msgspec.json.encode(parameters).decode()
    is_mig = parameters["kind"] == "MigDeviceConfig" and '"strategy":"MPS"' in written
    is_vfio = parameters["kind"] == "VfioDeviceConfig"
    # 1024Ti at most
    return is_mig or is_vfio or "1025Ti" in written or '"1E"' in written or "panic" in answer


def test_parameters_mean_what_they_mean_to_nvidias_driver() -> None:
    """Each is refused, or has the same limits, but for what the page says is not served."""
    different = []
    for answer in ANSWERS:
        taken, limits = read(answer["parameters"])
        expected = MpsLimits(answer.get("threads"), answer.get("memory"))
        if is_documented(answer):
            assert not taken or "panic" in answer
        elif taken != answer["taken"] or (limits is not None and limits != expected):
            different.append((answer, limits))
    assert different == []
