"""The machine beside its GPUs: the only reader of /proc and cgroups, the only sender of signals.

- `nodes`: NVIDIA's device nodes
- `cgroups`: the path of a process -> its container
- `process`: /proc/PID -> our values
- `peer`: a connection -> the process that opened it
- `logs`: a container's id -> the names of its pod and itself
- `running`: processes that we keep, for `companions`
- `survey`: all that can be seen of a node, for the doctor
- `linux`: `core.host.Host` on all of them, in worker threads
"""

from metagpu.host.linux import LinuxHost
from metagpu.host.nodes import DeviceNodes, device_nodes

__all__ = ["DeviceNodes", "LinuxHost", "device_nodes"]
