"""The program that starts daemons on the host, also from a container.

What a container starts is in its cgroup and sees its mounts, and the runtime ends and unmounts all
of that with the container. So this program enters the namespaces of the host's first process, and
the daemon gets a cgroup of its own. The daemon takes neither programs, nor open files, nor the
environment of the container with it.

The program runs alone, `python -I -S daemon_launcher.py OPERATION REQUEST`, with the request in
JSON: in another mount namespace Python finds none of its modules any more.
"""

import ctypes
import errno
import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

_NEW_MOUNTS: Final = 0x00020000
_NO_SUID, _NO_DEV, _NO_EXEC, _NO_LINKS = 2, 4, 8, 256
_BIND, _RECURSIVE, _SLAVE = 4096, 16384, 1 << 19
_DETACH: Final = 2
"""Flags of unshare(2), mount(2) and umount2(2); Linux before 5.10 ignores `_NO_LINKS`."""
_LOADERS: Final = ("lib64/ld-linux-x86-64.so.2", "lib/ld-linux-aarch64.so.1")
"""The dynamic loader of a whole system, as that of a driver container."""
_NVML: Final = "libnvidia-ml.so.1"
_SCORE: Final = "-997"
"""The OOM score of a pod that is critical to its node: all clients end with their daemon."""

_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""Where programs of the host are for a container, whose own PATH says nothing of them."""
_libc: Final = ctypes.CDLL(None, use_errno=True)

Request = Mapping[str, Any]


def main(operation: str, request: Request) -> None:
    """Carry out an operation; print its result, or why it failed, in JSON."""
    try:
        if request["on_host"] and enter_host(request["host_process"]):
            request = {**request, "path": _PATH}
        answer = {"result": OPERATIONS[operation](request)}
    except OSError as error:
        answer = {"problem": _text(error)}
    print(json.dumps(answer))


def enter_host(process: int) -> bool:
    """Enter the cgroup and mount namespace of a process of the host.

    Returns:
        Whether this process was elsewhere; one that has the host's mounts stays where it is.

    Raises:
        OSError: the kernel refuses.
    """
    if _root_mount(process) == _root_mount(os.getpid()):
        return False
    names = [f"/proc/{process}/ns/{kind}" for kind in ("cgroup", "mnt")]
    with _needs("the capability SYS_PTRACE", errno.EACCES, errno.EPERM):
        opened = {file: os.open(file, os.O_RDONLY | os.O_CLOEXEC) for file in names}
    with _needs("the capabilities SYS_ADMIN and SYS_CHROOT", errno.EPERM):
        for name, namespace in opened.items():
            _check(_libc.setns(namespace, 0), name)
    return True


def mount(request: Request) -> str:
    """Mount the missing volumes, each a tmpfs with a size and its folder's mode.

    A file takes memory of the kernel even if it is empty, so their number is limited too: one for
    each 4 KiB. The kernel follows no link in a volume that is not in `links`.

    Raises:
        OSError: a volume cannot be mounted.
    """
    for folder, size in request["volumes"].items():
        if not os.path.ismount(folder):
            mode = Path(folder).stat().st_mode & 0o7777
            flags = _NO_SUID | _NO_DEV | _NO_EXEC | (0 if folder in request["links"] else _NO_LINKS)
            options = f"size={size},nr_inodes={size // 4096},mode={mode:o}"
            _mount("tmpfs", folder, flags, "tmpfs", options)
    return ""


def unmount(request: Request) -> str:
    """Unmount the volumes of a daemon that has ended, and remove its cgroup.

    Raises:
        OSError: a volume cannot be unmounted.
    """
    for folder in request["volumes"]:
        if os.path.ismount(folder):
            with _may_mount():
                _check(_libc.umount2(os.fsencode(folder), _DETACH), folder)
    for root, _ in hierarchies() if request["cgroup"] else ():
        for level in (root / request["cgroup"], (root / request["cgroup"]).parent):
            with suppress(OSError):  # it has another daemon, or is gone
                level.rmdir()
    return ""


def start(request: Request) -> str:
    """Start a daemon that outlives this program; return its process number.

    Raises:
        OSError: the daemon cannot be started.
    """
    reader, writer = os.pipe()  # closed where the child becomes the daemon
    pid = os.fork()
    if pid == 0:
        try:
            _become(request)
        except OSError as error:
            os.write(writer, _text(error).encode())
        os._exit(1)
    os.close(writer)
    with os.fdopen(reader) as problem:
        if text := problem.read():
            raise OSError(text)
    return str(pid)


OPERATIONS: Final = {"mount": mount, "unmount": unmount, "start": start}


def _become(request: Request) -> None:
    """Become the daemon, in a session, a cgroup and a mount namespace of its own.

    Raises:
        OSError: it cannot be started.
    """
    os.setsid()
    if request["cgroup"]:
        # The root of a hierarchy of cgroups has the mode 0555.
        with _needs("the capability DAC_OVERRIDE", errno.EACCES):
            _enter_cgroup(request["cgroup"])
    with suppress(OSError):  # a lower score needs the capability SYS_RESOURCE
        Path("/proc/self/oom_score_adj").write_text(_SCORE, encoding="ascii")
    # The daemon appends, so that its output can be shortened while it runs.
    how = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND
    output = os.open(request["output"], how, 0o644)
    for source, target in ((os.open(os.devnull, os.O_RDONLY), 0), (output, 1), (output, 2)):
        os.dup2(source, target)

    command, env, root = request["command"], request["env"], "/"
    if request["on_host"]:
        root, program, libraries = _find(request)
        command = [program, *command[1:]]
        env = {"PATH": _path_beside(program, request["path"]), **libraries, **env}
    if request["mounts"] or root != "/":
        with _may_mount():
            _check(_libc.unshare(_NEW_MOUNTS), "a mount namespace")
        # What the host unmounts, as a pod's volume, is not kept by the daemon.
        _mount("", "/", _SLAVE | _RECURSIVE)
    if root != "/":
        for name in ("/proc", "/sys", "/dev"):
            if not any(Path(root + name).iterdir()):
                _mount(name, root + name, _BIND | _RECURSIVE)
        Path(root + request["folder"]).mkdir(parents=True, exist_ok=True)
        _mount(request["folder"], root + request["folder"], _BIND | _RECURSIVE)
    for target, folder in request["mounts"].items():
        _mount(folder, root.rstrip("/") + target, _BIND)
    if root != "/":
        with _needs("the capability SYS_CHROOT", errno.EPERM):
            os.chroot(root)
    os.chdir("/")
    os.execve(command[0], command, env)


def _find(request: Request) -> tuple[str, str, Mapping[str, str]]:
    """Find the daemon's program; return its root, its path there, and variables.

    A root with a loader of its own, as a driver container, is entered: its programs and the host's
    C library do not fit each other. Other roots have libraries of the driver alone.

    Raises:
        OSError: the host has no such program.
    """
    name = request["command"][0]
    if found := shutil.which(name, path=request["path"]):
        return "/", found, {}
    for root in request["roots"]:
        for folder in request["programs"]:
            if os.path.lexists(f"{root}/{folder}/{name}"):
                if any(os.path.lexists(f"{root}/{loader}") for loader in _LOADERS):
                    return root, f"/{folder}/{name}", {}
                libraries = [f"{root}/{library}" for library in request["libraries"]]
                used = [library for library in libraries if os.path.lexists(f"{library}/{_NVML}")]
                return "/", f"{root}/{folder}/{name}", _library_path(used)
    where = ", ".join([request["path"], *request["roots"]])
    raise OSError(f"there is no {name} on the host; looked in {where}")


def _library_path(folders: Sequence[str]) -> Mapping[str, str]:
    return {"LD_LIBRARY_PATH": ":".join(folders)} if folders else {}


def _path_beside(program: str, path: str) -> str:
    """Return a PATH in which a program finds the programs beside it first.

    Debian has NVIDIA's control daemon in `bin`, and the server that it starts in `sbin`.
    """
    beside = Path(program).parent
    return f"{beside}:{beside.parent / 'sbin'}:{path}"


def _enter_cgroup(name: str) -> None:
    """Move this process into a cgroup of the host's tree, in every hierarchy.

    Raises:
        OSError: the cgroup cannot be made, or not be entered.
    """
    for root, version in hierarchies():
        folder = root
        for level in Path(name).parts:
            parent, folder = folder, folder / level
            folder.mkdir(exist_ok=True)
            # A cpuset of cgroup v1 begins without processors and memory, and takes no process.
            for file in ("cpuset.cpus", "cpuset.mems") if version == "cgroup" else ():
                with suppress(FileNotFoundError):
                    if not (folder / file).read_text().strip():
                        (folder / file).write_text((parent / file).read_text())
        (folder / "cgroup.procs").write_text("0")


def hierarchies() -> Iterator[tuple[Path, str]]:
    """Return where each hierarchy of cgroups is mounted, and its version."""
    seen = set()
    for line in Path("/proc/self/mountinfo").read_bytes().split(b"\n"):
        mounted, _, rest = line.partition(b" - ")
        version = rest.partition(b" ")[0].decode(errors="replace")
        if version in {"cgroup", "cgroup2"}:
            _, _, device, root, point, *_ = mounted.split(b" ")
            if root == b"/" and device not in seen:
                seen.add(device)
                yield Path(os.fsdecode(point)), version


def _root_mount(process: int) -> bytes:
    """Return the number of a process's root mount, unique to its mount namespace.

    Unlike the namespaces themselves, it may be read without a capability.
    """
    lines = Path(f"/proc/{process}/mountinfo").read_bytes().split(b"\n")
    roots = [fields for line in lines if (fields := line.split(b" "))[4:5] == [b"/"]]
    return roots[-1][0] if roots else b""


def _mount(source: str, target: str, flags: int, kind: str = "", options: str = "") -> None:
    words = [os.fsencode(word) or None for word in (source, target, kind)]
    result = _libc.mount(*words, ctypes.c_ulong(flags), os.fsencode(options) or None)
    with _may_mount():
        _check(result, target)


def _check(result: int, what: str) -> None:
    """Raise the error of a failed call.

    Raises:
        OSError: the call failed.
    """
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what)


@contextmanager
def _may_mount() -> Iterator[None]:
    with (
        _needs("the capability SYS_ADMIN", errno.EPERM),
        _needs("the AppArmor profile Unconfined", errno.EACCES),
    ):
        yield


@contextmanager
def _needs(right: str, *numbers: int) -> Iterator[None]:
    """Name the missing right where a call in the block fails with these errors."""
    try:
        yield
    except OSError as error:
        if error.errno not in numbers:
            raise
        raise OSError(f"{_text(error)}; metagpu needs {right}") from error


def _text(error: OSError) -> str:
    where = f"{error.filename}: " if error.filename else ""
    return f"{where}{error.strerror or error}"


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
