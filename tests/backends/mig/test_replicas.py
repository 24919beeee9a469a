"""Instances of a layout that several containers may have: what is offered, preferred and given."""

from collections import Counter
from typing import Any

import pytest

from metagpu.backends.mig import MigBackend
from metagpu.backends.mig.options import MigOptions
from metagpu.core.config import parse
from metagpu.core.errors import ConfigError, TooManyReplicas
from metagpu.core.facts import GpusFound, SharesGranted, StockTold
from metagpu.core.gpu import Gpu
from metagpu.core.injection import Injection
from metagpu.core.layout import ID_LIMIT
from metagpu.core.model import Made, Share, Stock
from metagpu.core.sharing import conflicts
from metagpu.core.snapshot import Snapshot
from metagpu.sim.boards import BOARDS
from tests.backends.mig.gpus import mig_gpu
from tests.build import BACKENDS, after, offer

A, B = mig_gpu(0), mig_gpu(1)


def backend(layout: dict[str, int] | None = None, **options: Any) -> MigBackend:  # noqa: ANN401
    """Make the backend of a pool with replicas, three of each instance if nothing is said."""
    said = {"replicas": 3, **options}
    return MigBackend(MigOptions("mig", layout=layout or {"3g.20gb": 2}, **said), Injection())


def node(*gpus: Gpu, cutter: MigBackend | None = None) -> Snapshot:
    """Give what is known of GPUs that are cut."""
    shares = [share for it in gpus for share in (cutter or backend()).shares(it)]
    return after(GpusFound(gpus, at=0), offer(*shares))


def slots(shares: list[Share]) -> list[str]:
    """Say of which instances shares are, without the GPU."""
    return [it.id.partition("::")[2] for it in shares]


def test_each_instance_is_offered_several_times() -> None:
    """Ids say instance and replica, memory is divided, and the name says that it is shared."""
    shares = list(backend().shares(A))

    assert slots(shares) == [f"3g.20gb@{at}-t{n}" for at in (0, 4) for n in range(3)]
    assert {it.resource for it in shares} == {"nvidia.com/mig-3g.20gb.shared"}
    assert [it.number for it in shares] == list(range(6))
    assert {it.memory for it in shares} == {19968 * 2**20 // 3}
    assert not any(conflicts(a, b) for a in shares for b in shares if a is not b)


def test_only_some_profiles_are_shared() -> None:
    """Replicas by profile; what is not named is one container's, under its own name."""
    cutter = backend({"2g.10gb": 2, "1g.5gb": 3}, replicas={"1g.5gb": 4})
    counted = Counter(share.resource for share in cutter.shares(A))

    assert counted == {"nvidia.com/mig-1g.5gb.shared": 12, "nvidia.com/mig-2g.10gb": 2}
    assert set(cutter.resources) == {"nvidia.com/mig-1g.5gb.shared", "nvidia.com/mig-2g.10gb"}


def test_names_can_be_chosen() -> None:
    """By profile, as NVIDIA's plugin does without a new name, or one for all."""
    plain = backend(resource={"3g.20gb": "nvidia.com/mig-3g.20gb"})

    assert plain.resources == ("nvidia.com/mig-3g.20gb",)
    assert backend(resource="nvidia.com/gpu.shared").resources == ("nvidia.com/gpu.shared",)


def test_the_longest_ids_are_legal() -> None:
    """With as many replicas as are allowed, of every profile of every board."""
    boards = [mig_gpu(0, name) for name, board in BOARDS.items() if board.mig_profiles]
    lengths = [
        max(len(it.id) for it in backend({profile.name: 1}, replicas=100).shares(board))
        for board in boards
        for profile in board.mig_profiles
    ]
    assert max(lengths) <= ID_LIMIT


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("replicas: 101", "replicas is 101; allowed: 1 to 100"),
        ("replicas: {1g.5gb: 0}", "replicas is 0; allowed: 1 to 100"),
        ("replicas: {2g.10gb: 2}", "replicas names 2g.10gb, which layout has not; it has 1g.5gb"),
        ("resource: {2g.10gb: a.b/c}", "resource names 2g.10gb, which layout has not; it has 1g"),
    ],
)
def test_options_that_make_no_sense(options: str, message: str) -> None:
    """Wrong options are told with file, line and path."""
    text = (
        "version: metagpu/v1\n"
        f"pools: [{{name: a, backends: [{{backend: mig, layout: {{1g.5gb: 7}}, {options}}}]}}]"
    )
    with pytest.raises(ConfigError, match=rf"t.yaml: 2: pools\[0\].backends\[0\].*{message}"):
        parse(text, "t.yaml", BACKENDS)


def test_replicas_are_of_layouts() -> None:
    """An instance that is made for a pod is that pod's."""
    with pytest.raises(ValueError, match="failRequestsGreaterThanOne are for a layout"):
        MigOptions("mig", profiles=("1g.5gb",), replicas=2)


def test_a_container_gets_the_instance_that_the_fewest_have() -> None:
    """One after the other, over all instances of all GPUs; of equal ones the first GPU's."""
    snapshot, given = node(A, B), list[str]()
    for _ in range(6):
        free = [
            share
            for state in snapshot.gpus.values()
            for share in state.shares
            if share.id not in state.leases
        ]
        [share] = backend().prefer(free, (), 1, snapshot)
        given.append(f"{snapshot.gpus[share.gpu].gpu.index}:{slots([share])[0]}")
        snapshot = after(SharesGranted((share,), at=1), since=snapshot)

    assert given == [
        *("0:3g.20gb@0-t0", "0:3g.20gb@4-t0", "1:3g.20gb@0-t0", "1:3g.20gb@4-t0"),
        *("0:3g.20gb@0-t1", "0:3g.20gb@4-t1"),
    ]


def test_what_is_blocked_comes_last() -> None:
    """Shares that cannot be given now are named only if the others do not suffice."""
    blocked = {f"s{n}-t{k}": "foreign" for n in range(4) for k in range(3)}
    snapshot = after(StockTold(A.id, "mig", Stock(blocked=blocked), at=1), since=node(A))
    shares = list(snapshot.gpus[A.id].shares)

    assert slots(list(backend().prefer(shares, (), 1, snapshot))) == ["3g.20gb@4-t0"]
    assert slots(list(backend().prefer(shares, shares[:1], 2, snapshot))) == [
        "3g.20gb@0-t0",
        "3g.20gb@4-t0",
    ]


def test_several_replicas_are_refused_where_the_pool_says_so() -> None:
    """In the words of NVIDIA's plugin; several instances of one container are not concerned."""
    snapshot = node(A)
    shares = list(snapshot.gpus[A.id].shares)

    backend().check(shares[:2], snapshot)
    with pytest.raises(TooManyReplicas, match="maximum request size for shared resources is 1"):
        backend(fail_requests_greater_than_one=True).check(shares[:2], snapshot)

    alone = backend(replicas=1, fail_requests_greater_than_one=True)
    alone.check(alone.shares(A), node(A, cutter=alone))


async def test_an_instance_is_given_once() -> None:
    """Two replicas of one instance are one device, with the memory of both."""
    snapshot = node(A)
    shares = list(snapshot.gpus[A.id].shares)
    made = dict.fromkeys((share.id for share in shares[:2]), Made("MIG-a", 1, 0))
    snapshot = after(StockTold(A.id, "mig", Stock(made), at=1), since=snapshot)
    grant = await backend().grant(shares[:2], snapshot)

    assert grant.envs == {"NVIDIA_VISIBLE_DEVICES": "MIG-a", "METAGPU_MEMORY_MIB": "MIG-a=13312"}
