"""The grant of an MPS client."""

from pathlib import PurePosixPath

from metagpu.backends.common.mps_daemon.client_limits import grant_to_client
from metagpu.backends.common.mps_daemon.control import MpsDirectories
from metagpu.core.grants.grant import Mount
from metagpu.core.grants.injection import Injection
from tests.rigs.build import gpu

PIPES = f"/run/metagpu/mps/{gpu(0).id}/pipe"
PROGRAM = "/usr/local/bin/mgctl"


def test_no_mount_of_a_client_is_below_a_read_only_one() -> None:
    """With the default folders a container starts, and mgctl in it finds its socket."""
    injection = Injection(pod_dir="/var/lib/metagpu/pod", mgctl_path=PROGRAM)
    directories = MpsDirectories.for_device(injection.run_dir, gpu(0).id)

    grant = grant_to_client(injection.grant([gpu(0)]), directories, (), 100)

    paths = {PurePosixPath(it.container_path): it for it in grant.mounts}
    assert not [it for it in paths for above in it.parents if above in paths]
    assert paths[PurePosixPath(PIPES)] == Mount(PIPES, PIPES, read_only=False)
    assert paths[PurePosixPath(PROGRAM)].host_path == "/var/lib/metagpu/pod/mgctl"
    assert grant.envs["METAGPU_SOCKET"] == "/var/lib/metagpu/pod/mgctl.sock"


def test_a_client_of_another_run_directory_has_the_usual_folder() -> None:
    """Nothing moves where nothing is in the way."""
    injection = Injection(pod_dir="/pod", run_dir="/somewhere")
    directories = MpsDirectories.for_device(injection.run_dir, gpu(0).id)

    grant = grant_to_client(injection.grant([gpu(0)]), directories, (), 100)

    assert Mount("/run/metagpu", "/pod") in grant.mounts
    assert "METAGPU_SOCKET" not in grant.envs
