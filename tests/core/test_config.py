"""The configuration: what is taken."""

import pytest

from metagpu.backends.fraction import FractionBackend, FractionOptions, Split
from metagpu.backends.placement import Placement
from metagpu.core.config import DEFAULT, Config, Health, parse
from metagpu.core.enforcement import Annotation, Enforcement, Policy, Victims
from metagpu.core.injection import DeviceListStrategy, Injection
from metagpu.core.units import Bytes, Duration
from metagpu.core.xid import Severity
from tests.build import BACKENDS, config, gpu, pool
from tests.core.config_texts import refusal


def fractions(read: Config) -> FractionOptions:
    """Give what the first pool says to its first backend."""
    options = next(iter(read.options.values()))[0]
    assert isinstance(options, FractionOptions)
    return options


def test_without_a_file_metagpu_behaves_like_metagpu() -> None:
    """The default gives every GPU 100 shares under MetaGPU's name, refusing splits."""
    read = parse(DEFAULT, "<default>", BACKENDS)
    [(only, [backend])] = read.pools(Injection())

    assert only.gpus == "all"
    assert isinstance(backend, FractionBackend)
    assert backend.resources == ("cnvrg.io/metagpu",)
    assert len(backend.shares(gpu(0))) == 100
    assert fractions(read).split is Split.REFUSE


def test_every_default_is_what_a_short_file_gets() -> None:
    """A file that names only the backend gets what the default file says, and these settings."""
    read = parse(
        "version: metagpu/v1\npools: [{name: a, backends: [{backend: fraction}]}]", "f", BACKENDS
    )
    [(_, [backend])] = read.pools(Injection())

    assert [len(backend.shares(gpu(0))), *backend.resources] == [100, "cnvrg.io/metagpu"]
    assert fractions(read) == FractionOptions(
        backend="fraction", placement=Placement.BINPACK, split=Split.REFUSE, metagpu_env=True
    )
    assert read.envelope.health == Health(Duration(60), Duration(30), {})
    assert read.envelope.injection(Injection()) == Injection()


@pytest.mark.parametrize(
    ("said", "pod_dir", "command"),
    [
        ("{}", "/pod", "/usr/local/bin/mgctl"),
        ("{path: /opt/x/mgctl}", "/pod", "/opt/x/mgctl"),
        ("{path: null}", "/pod", ""),
        ("{inPods: false}", "", ""),
    ],
)
def test_mgctl_is_in_containers_as_wanted(said: str, pod_dir: str, command: str) -> None:
    """By default it is; where else, and whether at all, can be said."""
    read = config("mgctl: " + said + "\n" + pool())
    injection = read.envelope.injection(Injection(pod_dir="/pod"))

    assert (injection.pod_dir, injection.command) == (pod_dir, command)
    assert read.envelope.injection(Injection()) == Injection()


@pytest.mark.parametrize(
    "path",
    ["mgctl", "", "/", "//x", "/a/../b", "/a//b", "/a/", "/a:b", '"/a\\nb"', "/run/metagpu"],
)
def test_a_place_where_no_program_can_be_is_refused(path: str) -> None:
    """Container runtimes take such paths for something else, or the folder's own."""
    shown = path.strip('"').replace("\\\\", "\\")
    assert refusal(f"mgctl: {{path: {path or repr(path)}}}\n{pool()}") == (
        f"f.yaml: 1: mgctl: path '{shown}' is no place for a program; write one like "
        "/usr/local/bin/mgctl, or null"
    )


def test_everything_that_can_be_said_is_read() -> None:
    """Each key of the file arrives as what it means."""
    read = config("""\
version: metagpu/v1
deviceListStrategy: [envvar, cdi-cri]
passDeviceSpecs: false
cdiKind: example.com/gpu
health:
  quietPeriod: 5m
  rescanPeriod: 10s
  xids: {79: notice, 13: fatal}
pools:
  - name: big
    gpus: {index: "0-3,6", product: "*A100*", minMemory: 40Gi}
    backends:
      - {backend: fraction, resource: example.com/slice, memoryUnit: 1Gi, placement: spread,
         split: accept, metagpuEnv: false}
  - name: rest
    gpus: all
    backends: [{backend: fraction, sharesPerGpu: 4}]
""")

    assert read.envelope.health == Health(
        Duration(300), Duration(10), {79: Severity.NOTICE, 13: Severity.FATAL}
    )
    assert fractions(read) == FractionOptions(
        backend="fraction",
        resource="example.com/slice",
        memory_unit=Bytes(2**30),
        placement=Placement.SPREAD,
        split=Split.ACCEPT,
        metagpu_env=False,
    )
    assert [pool.name for pool, _ in read.pools(Injection())] == ["big", "rest"]
    assert read.envelope.injection(Injection(dev_root="/host", present=frozenset({"/dev/x"}))) == (
        Injection(
            strategies=frozenset({DeviceListStrategy.ENVVAR, DeviceListStrategy.CDI_CRI}),
            pass_device_specs=False,
            cdi_kind="example.com/gpu",
            dev_root="/host",
            present=frozenset({"/dev/x"}),
        )
    )


def test_each_pool_says_how_memory_is_enforced() -> None:
    """What a pool says of memory is its own; one that says nothing has the defaults."""
    read = config("""
version: metagpu/v1
pools:
  - name: strict
    gpus: {index: 0}
    memoryEnforcement:
      {policy: kill, headroom: 1Gi, grace: 5s, stopTimeout: 10s, victims: all, period: 1s,
       dryRun: true, driverLimits: false, allowAnnotations: [limit, policy]}
    backends: [{backend: fraction}]
  - name: rest
    backends: [{backend: fraction}]
  - name: never
    memoryEnforcement: {policy: off}
    backends: [{backend: fraction}]
""")
    strict, rest, never = (pool.memory_enforcement for pool in read.envelope.pools)

    assert strict == Enforcement(
        policy=Policy.KILL,
        headroom=Bytes(2**30),
        grace=Duration(5),
        stop_timeout=Duration(10),
        victims=Victims.ALL,
        period=Duration(1),
        dry_run=True,
        driver_limits=False,
        allow_annotations=(Annotation.LIMIT, Annotation.POLICY),
    )
    assert rest == Enforcement()
    assert never.policy is Policy.OFF


def test_json_is_yaml() -> None:
    """A configuration may be written as JSON."""
    text = (
        '{"version": "metagpu/v1", "pools": [{"name": "a", "backends": [{"backend": "fraction"}]}]}'
    )

    assert list(parse(text, "f.json", BACKENDS).options) == ["a"]


def test_two_pools_may_offer_one_resource_by_one_backend() -> None:
    """T4s in 15 shares and A100s in 40 can go by the same name."""
    read = config("""\
version: metagpu/v1
pools:
  - {name: t4, gpus: {product: "*T4*"}, backends: [{backend: fraction, sharesPerGpu: 15}]}
  - {name: a100, backends: [{backend: fraction, sharesPerGpu: 40}]}
""")

    assert [
        len(backend.shares(gpu(0)))
        for _, backends in read.pools(Injection())
        for backend in backends
    ] == [15, 40]
