"""The default files that each project publishes: their names and counts, written again as facts.

Sources: gpu-operator, `assets/state-mig-manager/0400_configmap.yaml`; mig-parted,
`examples/config.yaml`; MetaGPU, `deploy/static.yaml`; HAMi, the chart's device-configmap.yaml with
its values; k8s-device-plugin, README.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import yaml

_H100_80: Final = "2330 2331 2322 20B2 20B5 20F3 20F5 2324"
_A100_40: Final = "20B0 20B1 20F1 20F6"
_ALONE: Final = """
1g.5gb 7, 1g.5gb+me 1, 2g.10gb 3, 3g.20gb 2, 4g.20gb 1, 7g.40gb 1, 1g.24gb+gfx 4, 1g.24gb+me.all 1,
1g.24gb-me 4, 2g.48gb 2, 2g.48gb+gfx 2, 2g.48gb+me.all 1, 2g.48gb-me 2, 4g.96gb 1, 4g.96gb+gfx 1,
1g.10gb+me 1, 1g.20gb 4, 1g.23gb 7, 1g.23gb+me 1, 1g.24gb+me 1, 2g.20gb 3, 3g.40gb 2, 4g.40gb 1,
7g.80gb 1, 1g.6gb 4, 1g.6gb+me 1, 2g.12gb 2, 2g.12gb+me 1, 4g.24gb 1, 1g.12gb 7, 1g.12gb+me 1,
1g.24gb 4, 1g.45gb 4, 1g.47gb 4, 2g.24gb 3, 2g.45gb 3, 2g.47gb 3, 3g.47gb 2, 4g.47gb 1, 7g.94gb 1,
3g.48gb 2, 3g.90gb 2, 3g.93gb 2, 3g.95gb 2, 4g.48gb 1, 4g.90gb 1, 4g.93gb 1, 4g.95gb 1, 7g.96gb 1,
7g.180gb 1, 7g.186gb 1, 7g.189gb 1, 1g.18gb 7, 1g.18gb+me 1, 1g.35gb 4, 2g.35gb 3, 3g.71gb 2,
4g.71gb 1, 7g.141gb 1, 1g.36gb 4, 2g.36gb 3, 3g.72gb 2, 4g.72gb 1, 7g.144gb 1
"""
_BALANCED: Final = (
    ("2941", "1g.23gb 2, 2g.47gb 1, 3g.93gb 1"),
    ("2BB5", "1g.24gb 2, 2g.48gb 1"),
    ("2901", "1g.23gb 2, 2g.45gb 1, 3g.90gb 1"),
    ("2348", "1g.18gb 2, 2g.36gb 1, 3g.72gb 1"),
    ("2335 233B", "1g.18gb 2, 2g.35gb 1, 3g.71gb 1"),
    ("2321 233A", "1g.12gb 2, 2g.24gb 1, 3g.47gb 1"),
    (_H100_80, "1g.10gb 2, 2g.20gb 1, 3g.40gb 1"),
    (_A100_40, "1g.5gb 2, 2g.10gb 1, 3g.20gb 1"),
    ("20B7", "1g.6gb 2, 2g.12gb 1"),
    ("2342 233D 20B6 2329", "1g.12gb 2, 2g.24gb 1, 3g.48gb 1"),
)


def _counts(text: str) -> dict[str, int]:
    pairs = (pair.split() for pair in text.split(","))
    return {profile: int(count) for profile, count in pairs}


def _entry(
    instances: Mapping[str, int] | None, models: str = "", devices: str | Sequence[int] = "all"
) -> dict[str, Any]:
    """Return an entry of a layout; `None` is MIG off."""
    chosen = {"device-filter": [f"0x{model}10DE" for model in models.split()]} if models else {}
    entry: dict[str, Any] = {**chosen, "devices": devices, "mig-enabled": instances is not None}
    return entry if instances is None else {**entry, "mig-devices": dict(instances)}


def config_map(name: str, **files: object) -> str:
    """Write a ConfigMap whose files are `NAME.yaml`."""
    data = {f"{key}.yaml": yaml.safe_dump(value, sort_keys=False) for key, value in files.items()}
    return yaml.safe_dump(
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": data}
    )


OPERATOR_LAYOUTS: Final[Mapping[str, Any]] = {
    "all-disabled": [_entry(None)],
    "all-enabled": [_entry({})],
    **{
        f"all-{profile.replace('+', '.')}": [_entry({profile: count})]
        for profile, count in _counts(_ALONE).items()
    },
    "all-1g.10gb": [_entry({"1g.10gb": 7}, _H100_80), _entry({"1g.10gb": 4}, _A100_40)],
    "all-balanced": [_entry(_counts(counts), models) for models, counts in _BALANCED],
}
"""The GPU operator's layouts of MIG."""
OPERATOR: Final = config_map(
    "default-mig-parted-config", config={"version": "v1", "mig-configs": dict(OPERATOR_LAYOUTS)}
)

_MIXED: Final = _counts("1g.5gb 2, 2g.10gb 1, 3g.20gb 1")
MIG_PARTED: Final = yaml.safe_dump(
    {
        "version": "v1",
        "mig-configs": {
            "all-disabled": [_entry(None)],
            "all-enabled": [_entry({})],
            "all-1g.5gb": [_entry({"1g.5gb": 7})],
            "all-2g.10gb": [_entry({"2g.10gb": 3})],
            "all-3g.20gb": [_entry({"3g.20gb": 2})],
            "all-balanced": [_entry(_MIXED)],
            "custom-config": [
                _entry(None, devices=[0, 1, 2, 3]),
                _entry({"1g.5gb": 7}, devices=[4]),
                _entry({"2g.10gb": 3}, devices=[5]),
                _entry({"3g.20gb": 2}, devices=[6]),
                _entry(_MIXED, devices=[7]),
            ],
        },
    },
    sort_keys=False,
)
"""mig-parted's example."""

METAGPU: Final = "---\n".join(
    [
        "---\n# of the chart\napiVersion: v1\nkind: ServiceAccount\nmetadata: {name: metagpu}\n",
        config_map(
            "metagpu-device-plugin-config",
            config={
                "metaGpus": 2,
                "accelerator": "nvidia",
                "processesDiscoveryPeriod": 5,
                "deviceCacheTTL": 3600,
                "resourceName": "cnvrg.io/metagpu",
                "jwtSecret": "topSecret",
                "mgctlTar": "/tmp/mgctl",  # noqa: S108 - the file's own value
                "mgctlAutoInject": True,
                "autoReshare": True,
                "serverAddr": "0.0.0.0:50052",
                "memoryEnforcer": True,
            },
        ),
        "apiVersion: v1\nkind: Service\nmetadata: {name: metagpu-device-plugin}\n",
        "apiVersion: apps/v1\nkind: DaemonSet\nmetadata: {name: metagpu-device-plugin}\n",
    ]
)
"""MetaGPU's manifest for `kubectl apply`."""

HAMI: Final = config_map(
    "hami-scheduler-device",
    **{
        "device-config": {
            "nvidia": {
                "resourceCountName": "nvidia.com/gpu",
                "resourceMemoryName": "nvidia.com/gpumem",
                "resourceMemoryPercentageName": "nvidia.com/gpumem-percentage",
                "resourceCoreName": "nvidia.com/gpucores",
                "resourcePriorityName": "nvidia.com/priority",
                "overwriteEnv": False,
                "defaultMemory": 0,
                "defaultCores": 0,
                "defaultGPUNum": 1,
                "preConfiguredDeviceMemory": 0,
                "memoryFactor": 1,
                "deviceSplitCount": 10,
                "deviceMemoryScaling": 1,
                "deviceCoreScaling": 1,
                "enableNumaTopology": False,
                "gpuCorePolicy": "default",
                "libCudaLogLevel": 1,
                "runtimeClassName": "",
                "migProfileAllowlist": [
                    {"models": models.split(", "), "profiles": profiles.split()}
                    for models, profiles in (
                        ("A30", "1g.6gb 2g.12gb 4g.24gb"),
                        (
                            "A100-SXM4-40GB, A100-40GB-PCIe, A100-PCIE-40GB",
                            "1g.5gb 2g.10gb 3g.20gb 7g.40gb",
                        ),
                        (
                            "A100-SXM4-80GB, A100-80GB-PCIe, A100-PCIE-80GB",
                            "1g.10gb 2g.20gb 3g.40gb 7g.79gb",
                        ),
                        ("H100-PCIE-80GB, H100-SXM5-80GB", "1g.10gb 2g.20gb 3g.40gb 7g.80gb"),
                        ("H20, H100 on GH200", "1g.12gb 2g.24gb 3g.48gb 7g.96gb"),
                        ("H200 NVL, H200-SXM5", "1g.18gb 2g.35gb 3g.71gb 7g.141gb"),
                        ("B200", "1g.23gb 2g.45gb 3g.90gb 7g.180gb"),
                    )
                ],
            },
            "cambricon": {"resourceCountName": "cambricon.com/vmlu"},
            "iluvatars": [{"chipName": "MR-V100"}],
            "vnpus": {"configs": []},
        }
    },
)
"""HAMi's settings of devices, with the chart's values."""

NVIDIA: Final[Mapping[str, Any]] = {
    "default": {"version": "v1", "flags": {"migStrategy": "none"}},
    "flags": {
        "version": "v1",
        "flags": {
            "migStrategy": "none",
            "failOnInitError": True,
            "nvidiaDriverRoot": "/",
            "plugin": {
                "passDeviceSpecs": False,
                "deviceListStrategy": "envvar",
                "deviceIDStrategy": "uuid",
            },
        },
    },
    "slices": {
        "version": "v1",
        "sharing": {"timeSlicing": {"resources": [{"name": "nvidia.com/gpu", "replicas": 10}]}},
    },
    "mps": {
        "version": "v1",
        "sharing": {"mps": {"resources": [{"name": "nvidia.com/gpu", "replicas": 10}]}},
    },
}
"""The examples of the device plugin's README."""
