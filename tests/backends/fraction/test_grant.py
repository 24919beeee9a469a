"""Grants of fractions."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metagpu.backends.fraction.backend import FractionBackend
from metagpu.core.model.gpu import MIB, Gpu
from tests.backends.fraction.fractions import T4, A, B, fraction, node, of
from tests.rigs.build import METAGPU, gpu, offered, pool


async def test_a_grant_names_gpus_and_memory() -> None:
    """The container gets its GPUs and reads how much memory of each is its own."""
    backend, snapshot = node(A, B, options="sharesPerGpu: 10, metagpuEnv: true")
    grant = await backend.grant([*of(snapshot, B), *of(snapshot, A, 2, 7)], snapshot)

    assert grant.envs == {
        "NVIDIA_VISIBLE_DEVICES": f"{A.id},{B.id}",
        "METAGPU_MEMORY_MIB": f"{A.id}=8192,{B.id}=40960",
        "METAGPU_MAX_MEM": "49152",
        "CNVRG_META_GPU_DEVICES": ",".join(
            [
                f"cnvrg-meta-0-2-{A.id}",
                f"cnvrg-meta-0-7-{A.id}",
                *[f"cnvrg-meta-1-{number}-{B.id}" for number in range(10)],
            ]
        ),
    }


@pytest.mark.parametrize(
    ("metagpu_env", "names"),
    [
        (False, set()),
        (None, {"METAGPU_MAX_MEM"}),
        (True, {"METAGPU_MAX_MEM", "CNVRG_META_GPU_DEVICES"}),
    ],
)
async def test_the_names_of_shares_are_asked_for(
    *, metagpu_env: bool | None, names: set[str]
) -> None:
    """Containers get kilobytes of share names where the configuration asks for them alone."""
    _, snapshot = node(A)
    grant = await fraction(shares=10, metagpu_env=metagpu_env).grant(of(snapshot, A, 0), snapshot)

    assert grant.envs.keys() == {"NVIDIA_VISIBLE_DEVICES", "METAGPU_MEMORY_MIB", *names}


async def test_everything_of_the_injection_is_granted() -> None:
    """A grant has the injection's mounts, nodes, annotations and CDI names."""
    text = pool() + "deviceListStrategy: [volume-mounts, cdi-cri]\n"
    layout, snapshot = offered(A, text=text)
    grant = await layout.backends[METAGPU].grant(of(snapshot, A, 0), snapshot)
    base = layout.backends[METAGPU]
    assert isinstance(base, FractionBackend)
    plain = base.injection.grant([A])

    assert (grant.mounts, grant.nodes, grant.annotations, grant.cdi_names) == (
        plain.mounts,
        plain.nodes,
        plain.annotations,
        plain.cdi_names,
    )
    assert len(grant.mounts) == len(grant.cdi_names) == 1


@given(st.data())
async def test_the_order_of_ids_does_not_matter(data: st.DataObject) -> None:
    """The same ids in any order give the same answer to the last byte (case 42)."""
    backend, snapshot = node(A, B)
    shares = data.draw(st.permutations([*of(snapshot, A), *of(snapshot, B, 3, 4, 5)]))

    mixed = await backend.grant(shares, snapshot)
    straight = await backend.grant(sorted(shares, key=lambda share: share.id), snapshot)

    assert list(mixed.envs.items()) == list(straight.envs.items())
    assert mixed == straight


@pytest.mark.parametrize(
    ("options", "which", "count", "mib"),
    [
        ("sharesPerGpu: 100", A, 30, 12288),
        ("sharesPerGpu: 100", A, 1, 409),
        ("sharesPerGpu: 100", A, 100, 40960),
        ("sharesPerGpu: 3", A, 1, 13653),
        ("sharesPerGpu: 3", A, 2, 27306),
        ("sharesPerGpu: 3", A, 3, 40960),
        ("sharesPerGpu: 7", T4, 7, 15360),
        ("memoryUnit: 1Gi", A, 40, 40960),
        ("memoryUnit: 1Gi", T4, 3, 3072),
        ("memoryUnit: 1G", A, 1, 953),
        ("memoryUnit: 1G", A, 42, 40054),
    ],
)
async def test_memory_is_rounded_down_once(options: str, which: Gpu, count: int, mib: int) -> None:
    """The memory of a grant is that of its shares together, rounded down to MiB at the end."""
    backend, snapshot = node(which, options=options)
    grant = await backend.grant(of(snapshot, which)[:count], snapshot)

    assert grant.envs["METAGPU_MEMORY_MIB"] == f"{which.id}={mib}"
    assert grant.envs["METAGPU_MAX_MEM"] == str(mib)


@given(st.integers(1, 10_000), st.integers(1, 200_000), st.data())
async def test_memory_is_the_exact_part(count: int, mib: int, data: st.DataObject) -> None:
    """The memory of a grant is its exact part of the GPU's, rounded down to a MiB."""
    held = data.draw(st.integers(1, count))
    whole = gpu(0, memory_mib=mib)
    shares = fraction(shares=count).shares(whole)[:held]
    _, snapshot = offered(whole)
    grant = await fraction(shares=count).grant(shares, snapshot)

    assert grant.envs["METAGPU_MAX_MEM"] == str((whole.memory or 0) * held // count // MIB)


async def test_pools_of_one_resource_grant_by_their_own_count() -> None:
    """Each GPU's memory follows its own pool's count, also under a shared name."""
    text = (
        "version: metagpu/v1\npools:\n"
        "  - {name: t4, gpus: {index: 3}, backends: [{backend: fraction, sharesPerGpu: 15}]}\n"
        "  - {name: a100, backends: [{backend: fraction, sharesPerGpu: 40}]}\n"
    )
    layout, snapshot = offered(A, T4, text=text)
    grants = [
        await layout.backends[METAGPU].grant(of(snapshot, which)[:4], snapshot) for which in (A, T4)
    ]

    assert [grant.envs["METAGPU_MAX_MEM"] for grant in grants] == ["4096", "4096"]


async def test_a_list_too_long_for_linux_is_left_out() -> None:
    """An environment string of 128 KiB keeps a container from starting; the rest is enough."""
    backend, snapshot = node(A, options="sharesPerGpu: 4000, metagpuEnv: true")
    few, many = [await backend.grant(of(snapshot, A)[:count], snapshot) for count in (2000, 4000)]

    assert len(few.envs["CNVRG_META_GPU_DEVICES"]) < 128 * 1024
    assert many.envs.keys() == few.envs.keys() - {"CNVRG_META_GPU_DEVICES"}
    assert many.envs["METAGPU_MAX_MEM"] == "40960"
