"""Configurations that are accepted."""

import pytest

from metagpu.backends.common.packing import PlacementPolicy
from metagpu.backends.fraction.backend import FractionBackend, FractionOptions, SplitPolicy
from metagpu.core.config.config import DEFAULT, Config, HealthConfig, name_problem, parse
from metagpu.core.config.memory import (
    AnnotationKind,
    EnforcementPolicy,
    MemoryEnforcement,
    VictimSelection,
)
from metagpu.core.config.units import Bytes, Duration
from metagpu.core.grants.injection import DeviceListStrategy, Injection
from metagpu.core.model.xid_severity import Severity
from tests.core.config.config_texts import refusal
from tests.rigs.build import BACKENDS, config, gpu, pool


def fractions(read: Config) -> FractionOptions:
    """Return the options of the first pool's first backend."""
    options = next(iter(read.options.values()))[0]
    assert isinstance(options, FractionOptions)
    return options


def test_without_a_file_metagpu_behaves_like_metagpu() -> None:
    """The default gives every GPU 100 shares under MetaGPU's name, refusing splits."""
    read = parse(DEFAULT, "<default>", BACKENDS)
    [(only, [backend])] = read.build_backends(Injection())

    assert only.gpus == "all"
    assert isinstance(backend, FractionBackend)
    assert backend.resources == ("cnvrg.io/metagpu",)
    assert len(backend.shares(gpu(0))) == 100
    assert fractions(read).split is SplitPolicy.REFUSE


def test_every_default_is_what_a_short_file_gets() -> None:
    """A file that names only the backend gets what the default file says, and these settings."""
    read = parse(
        "version: metagpu/v1\npools: [{name: a, backends: [{backend: fraction}]}]", "f", BACKENDS
    )
    [(_, [backend])] = read.build_backends(Injection())

    assert [len(backend.shares(gpu(0))), *backend.resources] == [100, "cnvrg.io/metagpu"]
    assert fractions(read) == FractionOptions(
        backend="fraction",
        placement=PlacementPolicy.BINPACK,
        split=SplitPolicy.REFUSE,
        metagpu_env=None,
    )
    assert read.root.health == HealthConfig(Duration(60), Duration(30), {})
    assert read.root.injection(Injection()) == Injection()


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
    """By default mgctl is in containers; the configuration may move or remove the program."""
    read = config("mgctl: " + said + "\n" + pool())
    injection = read.root.injection(Injection(pod_dir="/pod"))

    assert (injection.pod_dir, injection.mgctl_path) == (pod_dir, command)
    assert read.root.injection(Injection()) == Injection()


@pytest.mark.parametrize(
    "path",
    ["mgctl", "", "/", "//x", "/a/../b", "/a//b", "/a/", "/a:b", '"/a\\nb"', "/run/metagpu"],
)
def test_a_place_where_no_program_can_be_is_refused(path: str) -> None:
    """Paths of the container runtime or of mgctl's own folder are refused."""
    shown = path.strip('"').replace("\\\\", "\\")
    assert refusal(f"mgctl: {{path: {path or repr(path)}}}\n{pool()}") == (
        f"f.yaml: 1: mgctl.path: path '{shown}' cannot be mounted as a program; write one like "
        "/usr/local/bin/mgctl, or null"
    )


@pytest.mark.parametrize("path", ["/usr/bin/sudo", "/bin/sh", "/usr/local/bin/mgctl.sh"])
def test_no_other_program_of_an_image_is_covered(path: str) -> None:
    """A configuration replaces no program of an image but mgctl itself."""
    assert refusal(f"mgctl: {{path: {path}}}\n{pool()}") == (
        f"f.yaml: 1: mgctl.path: path '{path}' would cover another program of every image; it has "
        "to end in /mgctl, such as /usr/local/bin/mgctl"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "version: metagpu/v1\npools:\n" + "- {name: a, backends: []}\n" * 65,
            "2: pools: there are 65 pools; allowed: 64 at most",
        ),
        (
            f"version: metagpu/v1\npools: [{{name: a, backends: [{'{backend: whole},' * 17}]}}]",
            "2: pools[0].backends: there are 17 backends; allowed: 16 at most",
        ),
    ],
)
def test_more_than_any_node_needs_is_refused(text: str, message: str) -> None:
    """The number of pools, and of backends in one, is limited."""
    assert refusal(text) == f"f.yaml: {message}"


def test_every_key_is_read() -> None:
    """Each key of the file is read with its meaning."""
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

    assert read.root.health == HealthConfig(
        Duration(300), Duration(10), {79: Severity.NOTICE, 13: Severity.FATAL}
    )
    assert fractions(read) == FractionOptions(
        backend="fraction",
        resource="example.com/slice",
        memory_unit=Bytes(2**30),
        placement=PlacementPolicy.SPREAD,
        split=SplitPolicy.ACCEPT,
        metagpu_env=False,
    )
    assert [pool.name for pool, _ in read.build_backends(Injection())] == ["big", "rest"]
    assert read.root.injection(
        Injection(dev_root="/host", device_nodes_present=frozenset({"/dev/x"}))
    ) == (
        Injection(
            strategies=frozenset({DeviceListStrategy.ENVVAR, DeviceListStrategy.CDI_CRI}),
            pass_device_specs=False,
            cdi_kind="example.com/gpu",
            dev_root="/host",
            device_nodes_present=frozenset({"/dev/x"}),
        )
    )


def test_each_pool_has_its_memory_enforcement() -> None:
    """Each pool has its own memory enforcement; a pool without one has the defaults."""
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
    strict, rest, never = (pool.memory_enforcement for pool in read.root.pools)

    assert strict == MemoryEnforcement(
        policy=EnforcementPolicy.KILL,
        headroom=Bytes(2**30),
        grace=Duration(5),
        stop_timeout=Duration(10),
        victims=VictimSelection.ALL,
        period=Duration(1),
        dry_run=True,
        driver_limits=False,
        allow_annotations=(AnnotationKind.LIMIT, AnnotationKind.POLICY),
    )
    assert rest == MemoryEnforcement()
    assert never.policy is EnforcementPolicy.OFF


def test_json_is_yaml() -> None:
    """A configuration may be written as JSON."""
    text = (
        '{"version": "metagpu/v1", "pools": [{"name": "a", "backends": [{"backend": "fraction"}]}]}'
    )

    assert list(parse(text, "f.json", BACKENDS).options) == ["a"]


def test_two_pools_may_offer_one_resource_by_one_backend() -> None:
    """T4s in 15 shares and A100s in 40 can have the same resource name."""
    read = config("""\
version: metagpu/v1
pools:
  - {name: t4, gpus: {product: "*T4*"}, backends: [{backend: fraction, sharesPerGpu: 15}]}
  - {name: a100, backends: [{backend: fraction, sharesPerGpu: 40}]}
""")

    assert [
        len(backend.shares(gpu(0)))
        for _, backends in read.build_backends(Injection())
        for backend in backends
    ] == [15, 40]


@pytest.mark.parametrize(
    ("of_pool", "of_backend", "offer"),
    [("", "", "exact"), ("offer: all", "", "all"), ("offer: all", ", offer: exact", "exact")],
)
def test_the_offer_of_a_pool_holds_for_its_backends(
    of_pool: str, of_backend: str, offer: str
) -> None:
    """A backend that has the option follows its pool, unless the file says otherwise there."""
    text = (
        "version: metagpu/v1\npools:\n"
        f"  - {{name: all, backends: [{{backend: fraction{of_backend}}}]"
        f"{', ' + of_pool if of_pool else ''}}}\n"
    )
    [options] = parse(text, "c.yaml", BACKENDS).options["all"]
    assert isinstance(options, FractionOptions)
    assert options.offer == offer


ACCEPTED = [
    "cnvrg.io/metagpu",
    "vendor.com/foo_Bar-1.2",
    "vendor.com/" + "a" * 63,
    "v" * 200 + "/foo",
    "v" * 244 + "/foo",
    "a.b.c.d/x",
    "localhost/X",
    "1.2/3",
    "requests/foo",
    "my-requests.com/foo",
    "kubernetes.iot/foo",
]
DOMAIN = "the domain must be a lower-case DNS name of at most 244 characters"
PARTS = "it needs a domain, one `/` and a name, as in cnvrg.io/metagpu"
LAST = "the name after `/` must be 1 to 63 of A-Z a-z 0-9 . _ -, alphanumeric at both ends"
OWN = "kubernetes.io is Kubernetes' own domain"
REFUSED = [
    ("foo", PARTS),
    ("", PARTS),
    ("vendor.com/", PARTS),
    ("vendor.com/a/b", PARTS),
    ("kubernetes.io/foo", OWN),
    ("vendor.kubernetes.io/foo", OWN),
    ("requests.vendor.com/foo", "a domain must not begin with `requests.`"),
    ("Vendor.com/foo", DOMAIN),
    ("/foo", DOMAIN),
    ("v" * 245 + "/foo", DOMAIN),
    ("vendor..com/foo", DOMAIN),
    ("-vendor.com/foo", DOMAIN),
    ("vendor.com-/foo", DOMAIN),
    ("vendor_a.com/foo", DOMAIN),
    ("vendor.com\n/foo", DOMAIN),
    ("vendor.com/" + "a" * 64, LAST),
    ("vendor.com/-x", LAST),
    ("vendor.com/x-", LAST),
    ("vendor.com/x y", LAST),
    ("vendor.com/é", LAST),
    ("vendor.com/x\n", LAST),
]


@pytest.mark.parametrize("name", ACCEPTED)
def test_names_the_kubelet_takes(name: str) -> None:
    """A name that a kubelet was seen to accept is accepted."""
    assert name_problem(name) is None


@pytest.mark.parametrize(("name", "reason"), REFUSED)
def test_names_the_kubelet_refuses(name: str, reason: str) -> None:
    """A name that a kubelet refuses is refused first, with the rule it breaks."""
    assert name_problem(name) == reason
