"""GPUs with fractions."""

from collections import Counter
from collections.abc import Sequence

from metagpu.backends.fraction.backend import FractionBackend, FractionOptions
from metagpu.core.config.units import Bytes
from metagpu.core.grants.injection import Injection
from metagpu.core.model.gpu import Gpu
from metagpu.core.model.shares import Share
from metagpu.core.model.snapshot import Snapshot
from tests.rigs.build import METAGPU, gpu, offered, pool

A, B, C = gpu(0), gpu(1), gpu(2)
T4 = gpu(3, name="Tesla T4", memory_mib=15360)


def fraction(
    *, shares: int | None = None, unit: str | None = None, metagpu_env: bool | None = True
) -> FractionBackend:
    """Create the backend with some options."""
    return FractionBackend(
        FractionOptions(
            backend="fraction",
            shares_per_gpu=shares,
            memory_unit=None if unit is None else Bytes.parse(unit),
            metagpu_env=metagpu_env,
        ),
        Injection(),
    )


def node(*gpus: Gpu, options: str = "sharesPerGpu: 10") -> tuple[FractionBackend, Snapshot]:
    """Offer fractions of GPUs; return the backend and the snapshot."""
    layout, snapshot = offered(*gpus, text=pool(options))
    backend = layout.backends[METAGPU]
    assert isinstance(backend, FractionBackend)
    return backend, snapshot


def of(snapshot: Snapshot, where: Gpu, *numbers: int) -> list[Share]:
    """Return shares of a GPU by their numbers, all of them without numbers."""
    shares = snapshot.gpus[where.id].shares
    return [shares[number] for number in numbers] if numbers else list(shares)


def counted(shares: Sequence[Share]) -> dict[str, int]:
    """Count shares by GPU."""
    return dict(Counter(share.gpu for share in shares))
