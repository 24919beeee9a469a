"""Certificates and kubeconfigs of the node, made with the openssl command."""

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.rig.errors import RigError

DAYS = "7"

# Without a configuration of its own, openssl would add the system's extensions.
BLANK_CONFIGURATION = "[req]\ndistinguished_name = dn\n[dn]\n"


@dataclass(frozen=True)
class Identity:
    """The subject of a certificate: file name, Kubernetes user and group, addresses."""

    name: str
    user: str
    group: str = ""
    addresses: str = "IP:127.0.0.1,DNS:localhost"


def identities(node_name: str) -> list[Identity]:
    """Return all holders of certificates on a node called NODE_NAME."""
    server = "IP:127.0.0.1,IP:10.96.0.1,DNS:localhost,DNS:kubernetes.default.svc"
    return [
        Identity("apiserver", "kube-apiserver", addresses=server),
        Identity("admin", "admin", "system:masters"),
        Identity("controller-manager", "system:kube-controller-manager"),
        Identity("scheduler", "system:kube-scheduler"),
        Identity("kubelet", f"system:node:{node_name}", "system:nodes"),
    ]


class Pki:
    """A folder of keys, certificates and kubeconfigs."""

    def __init__(self, folder: Path, api_url: str) -> None:
        self._folder = folder
        self._api_url = api_url

    def create(self, node_name: str) -> None:
        """Fill the folder: an authority, every identity, and the service-account key."""
        self._folder.mkdir(mode=0o700)
        (self._folder / "openssl.cnf").write_text(BLANK_CONFIGURATION)
        self._certificate("ca", "/CN=metagpu-e2e", ["basicConstraints=critical,CA:TRUE"])
        for identity in identities(node_name):
            subject = f"/O={identity.group}" if identity.group else ""
            self._certificate(
                identity.name,
                f"{subject}/CN={identity.user}",
                [
                    "basicConstraints=critical,CA:FALSE",
                    "extendedKeyUsage=serverAuth,clientAuth",
                    f"subjectAltName={identity.addresses}",
                ],
                issuer="ca",
            )
            self._kubeconfig(identity.name)
        # RSA: the API server reads a public key only out of a private key file of this kind.
        self._openssl("genrsa", "-out", self.key("service-accounts"), "2048")

    def key(self, name: str) -> str:
        """Return the path of NAME's private key."""
        return str(self._folder / f"{name}.key")

    def certificate(self, name: str) -> str:
        """Return the path of NAME's certificate; `ca` is the authority's."""
        return str(self._folder / f"{name}.crt")

    def kubeconfig(self, name: str) -> str:
        """Return the path of NAME's kubeconfig."""
        return str(self._folder / f"{name}.kubeconfig")

    def token_kubeconfig(self, name: str, token: str) -> str:
        """Write a kubeconfig with a token, as of a ServiceAccount; return its path."""
        self._write_kubeconfig(name, {"token": token})
        return self.kubeconfig(name)

    def _certificate(
        self, name: str, subject: str, extensions: list[str], issuer: str | None = None
    ) -> None:
        arguments = ["-subj", subject, "-keyout", self.key(name), "-out", self.certificate(name)]
        for extension in extensions:
            arguments += ["-addext", extension]
        if issuer is not None:
            arguments += ["-CA", self.certificate(issuer), "-CAkey", self.key(issuer)]
        self._openssl(
            *("req", "-x509", "-config", str(self._folder / "openssl.cnf"), "-days", DAYS),
            *("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-noenc"),
            *arguments,
        )

    def _kubeconfig(self, name: str) -> None:
        user = {"client-certificate": self.certificate(name), "client-key": self.key(name)}
        self._write_kubeconfig(name, user)

    def _write_kubeconfig(self, name: str, user: dict[str, str]) -> None:
        cluster = {"server": self._api_url, "certificate-authority": self.certificate("ca")}
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "e2e", "cluster": cluster}],
            "users": [{"name": name, "user": user}],
            "contexts": [{"name": "e2e", "context": {"cluster": "e2e", "user": name}}],
            "current-context": "e2e",
        }
        Path(self.kubeconfig(name)).write_text(json.dumps(document, indent=1))

    @staticmethod
    def _openssl(*arguments: str) -> None:
        done = subprocess.run(["openssl", *arguments], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RigError(f"openssl {arguments[0]} failed: {done.stderr.strip()}")
