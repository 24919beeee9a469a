"""The command lines and configuration files of the node's programs.

Everything listens on 127.0.0.1, on ports that neither a usual cluster nor the
kernel's range for outgoing connections takes. Unusual settings are there so that
a node runs on small virtual machines and in containers: without CAP_SYS_RESOURCE
no process can lower an OOM score, so no program is configured to.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.rig.images import PAUSE_IMAGE
from tests.e2e.rig.pki import Pki
from tests.e2e.rig.tools import Tools

NODE_NAME = "127.0.0.1"  # as a name; the kubelet refuses loopback as --node-ip
LOOPBACK = "127.0.0.1"
NETWORK = "metagpu-e2e"
"""The pod network's name, and its bridge's."""
POD_SUBNET = "10.244.0.0/24"
SERVICE_SUBNET = "10.96.0.0/24"
KUBERNETES_ADDRESS = "10.96.0.1"
"""The address of the Service `kubernetes`: the API server takes the first one."""
KUBELET_HOME = Path("/var/lib/kubelet")
"""Part of the device plugin API: plugins look for kubelet.sock under it."""

API_PORT = 26443
ETCD_PORT = 22379
ETCD_PEER_PORT = 22380
KUBELET_PORT = 20250
KUBELET_HEALTH_PORT = 20248
PORTS = (API_PORT, ETCD_PORT, ETCD_PEER_PORT, KUBELET_PORT, KUBELET_HEALTH_PORT)

API_URL = f"https://{LOOPBACK}:{API_PORT}"
STATUS_PERIOD = "1s"
"""Interval at which the kubelet reports its devices to the API server (10 s by default)."""


@dataclass(frozen=True)
class NodePaths:
    """The folders of one node, all under its home."""

    home: Path

    @property
    def logs(self) -> Path:
        """Return the folder of logs, one file per program."""
        return self.home / "logs"

    @property
    def pids(self) -> Path:
        """Return the folder of started pids, for a later run to end."""
        return self.home / "pids"

    @property
    def containerd_socket(self) -> Path:
        """Return containerd's socket, by which a container's shim is recognized too."""
        return self.home / "containerd.sock"

    @property
    def containerd_state(self) -> Path:
        """Return containerd's state folder, on a real node a tmpfs that a reboot clears."""
        return self.home / "containerd-state"

    @property
    def cdi(self) -> Path:
        """Return the daemon's folder of CDI specifications, beside the usual two."""
        return self.home / "cdi"

    @property
    def configuration(self) -> Path:
        """Return the folder of configuration files, except the network's."""
        return self.home / "configuration"

    @property
    def static_pods(self) -> Path:
        """Return the folder of static pods, which need no API server."""
        return self.home / "static-pods"

    @property
    def network(self) -> Path:
        """Return the folder of the network's configuration, its only file."""
        return self.home / "network"

    def create(self) -> None:
        """Create the folders that programs expect; only root may read them."""
        self.home.mkdir(mode=0o700)
        for folder in (
            *(self.logs, self.pids, self.configuration),
            *(self.static_pods, self.network),
        ):
            folder.mkdir()


def write_configuration(paths: NodePaths, tools: Tools, pki: Pki) -> None:
    """Write the programs' configuration files."""
    folder = paths.configuration
    (folder / "resolv.conf").touch()
    (folder / "containerd.toml").write_text(_containerd(paths, tools))
    write_kubelet_configuration(paths, pki)
    (paths.network / "bridge.conflist").write_text(json.dumps(_network(paths), indent=1))


def write_kubelet_configuration(
    paths: NodePaths, pki: Pki, changes: Mapping[str, object] | None = None
) -> None:
    """Write the kubelet's configuration, with CHANGES to the usual one."""
    configuration = _kubelet(paths, pki) | dict(changes or {})
    path = paths.configuration / "kubelet.json"
    path.write_text(json.dumps(configuration, indent=1))


def _containerd(paths: NodePaths, tools: Tools) -> str:
    return f"""
version = 3
root = "{paths.home}/containerd"
state = "{paths.containerd_state}"
[grpc]
  address = "{paths.containerd_socket}"
[plugins."io.containerd.internal.v1.opt"]
  path = "{paths.home}/opt"
[plugins."io.containerd.nri.v1.nri"]
  disable = true
[plugins."io.containerd.grpc.v1.cri"]
  stream_server_address = "{LOOPBACK}"
[plugins."io.containerd.cri.v1.images".pinned_images]
  sandbox = "{PAUSE_IMAGE}"
[plugins."io.containerd.cri.v1.runtime"]
  restrict_oom_score_adj = true
  netns_mounts_under_state_dir = true
  cdi_spec_dirs = ["/etc/cdi", "/var/run/cdi", "{paths.cdi}"]
  [plugins."io.containerd.cri.v1.runtime".cni]
    bin_dirs = ["{tools.cni_folder}"]
    conf_dir = "{paths.network}"
  [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc.options]
      BinaryName = "{tools.path("runc")}"
"""


def _kubelet(paths: NodePaths, pki: Pki) -> dict[str, object]:
    nothing_scarce = ("nodefs.available", "nodefs.inodesFree", "imagefs.available")
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": LOOPBACK,
        "port": KUBELET_PORT,
        "healthzBindAddress": LOOPBACK,
        "healthzPort": KUBELET_HEALTH_PORT,
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": pki.certificate("ca")},
        },
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": pki.certificate("kubelet"),
        "tlsPrivateKeyFile": pki.key("kubelet"),
        "containerRuntimeEndpoint": f"unix://{paths.containerd_socket}",
        "cgroupDriver": "cgroupfs",
        "failCgroupV1": False,
        "failSwapOn": False,
        "oomScoreAdj": 0,
        "makeIPTablesUtilChains": False,
        "nodeStatusUpdateFrequency": STATUS_PERIOD,
        "resolvConf": str(paths.configuration / "resolv.conf"),
        "staticPodPath": str(paths.static_pods),
        "podLogsDir": str(paths.home / "pod-logs"),
        "volumePluginDir": str(paths.home / "volume-plugins"),
        # A registry's image that has another name here too would have to be pulled by that name.
        "featureGates": {"KubeletEnsureSecretPulledImages": False},
        # The machine's disk may be fuller than a kubelet's default allows; images stay.
        "imageGCHighThresholdPercent": 100,
        "evictionHard": {"memory.available": "10Mi"} | dict.fromkeys(nothing_scarce, "0%"),
    }


def _network(paths: NodePaths) -> dict[str, object]:
    addresses = {
        "type": "host-local",
        "ranges": [[{"subnet": POD_SUBNET}]],
        "routes": [{"dst": SERVICE_SUBNET}],
        "dataDir": str(paths.home / "addresses"),
    }
    bridge = {"type": "bridge", "bridge": NETWORK, "isGateway": True, "ipam": addresses}
    # CRI-O has the plugin check its work, and an older one does not find the route that it made.
    return {"cniVersion": "0.4.0", "disableCheck": True, "name": NETWORK, "plugins": [bridge]}


def etcd_command(paths: NodePaths, tools: Tools) -> list[str]:
    """Return the command of the API server's store."""
    client, peer = f"http://{LOOPBACK}:{ETCD_PORT}", f"http://{LOOPBACK}:{ETCD_PEER_PORT}"
    return [
        tools.path("etcd"),
        "--name=e2e",
        f"--data-dir={paths.home}/etcd",
        f"--listen-client-urls={client}",
        f"--advertise-client-urls={client}",
        f"--listen-peer-urls={peer}",
        f"--initial-advertise-peer-urls={peer}",
        f"--initial-cluster=e2e={peer}",
    ]


def apiserver_command(paths: NodePaths, tools: Tools, pki: Pki) -> list[str]:
    """Return the command of the API server, without a loopback endpoints object."""
    return [
        tools.path("kube-apiserver"),
        f"--etcd-servers=http://{LOOPBACK}:{ETCD_PORT}",
        f"--bind-address={LOOPBACK}",
        f"--advertise-address={LOOPBACK}",
        f"--secure-port={API_PORT}",
        "--endpoint-reconciler-type=none",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",
        "--allow-privileged=true",
        f"--cert-dir={paths.home}/apiserver",
        f"--client-ca-file={pki.certificate('ca')}",
        f"--tls-cert-file={pki.certificate('apiserver')}",
        f"--tls-private-key-file={pki.key('apiserver')}",
        f"--kubelet-client-certificate={pki.certificate('admin')}",
        f"--kubelet-client-key={pki.key('admin')}",
        f"--kubelet-certificate-authority={pki.certificate('ca')}",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-account-key-file={pki.key('service-accounts')}",
        f"--service-account-signing-key-file={pki.key('service-accounts')}",
        f"--service-cluster-ip-range={SERVICE_SUBNET}",
    ]


def scheduler_command(tools: Tools, pki: Pki) -> list[str]:
    """Return the command of the standard scheduler; it serves nothing."""
    return [
        tools.path("kube-scheduler"),
        f"--kubeconfig={pki.kubeconfig('scheduler')}",
        "--leader-elect=false",
        "--secure-port=0",
    ]


def controller_manager_command(paths: NodePaths, tools: Tools, pki: Pki) -> list[str]:
    """Return the command of the standard controllers; they serve nothing."""
    return [
        tools.path("kube-controller-manager"),
        f"--kubeconfig={pki.kubeconfig('controller-manager')}",
        "--leader-elect=false",
        "--secure-port=0",
        "--use-service-account-credentials=true",
        f"--root-ca-file={pki.certificate('ca')}",
        f"--service-account-private-key-file={pki.key('service-accounts')}",
        f"--flex-volume-plugin-dir={paths.home}/volume-plugins",
    ]


def containerd_command(paths: NodePaths, tools: Tools) -> list[str]:
    """Return the command of the container runtime."""
    return [tools.path("containerd"), f"--config={paths.configuration}/containerd.toml"]


def kubelet_command(paths: NodePaths, tools: Tools, pki: Pki) -> list[str]:
    """Return the command of the kubelet."""
    return [
        tools.path("kubelet"),
        f"--config={paths.configuration}/kubelet.json",
        f"--kubeconfig={pki.kubeconfig('kubelet')}",
        f"--cert-dir={paths.home}/kubelet-certificates",
        f"--hostname-override={NODE_NAME}",
        # The kubelet logs each list of a plugin at this level; `Joined.messages` counts them.
        "--vmodule=client=2",
    ]
