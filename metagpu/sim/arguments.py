"""The commands of `metagpu sim` as people write them: `steer` knows what they do."""

import argparse
from typing import Any, Final, get_args

import msgspec

from metagpu.core.errors import ConfigError
from metagpu.core.units import Bytes, Duration
from metagpu.sim.boards import BOARDS
from metagpu.sim.spec import ACTIONS
from metagpu.sim.steer import AnyCommand

_EXAMPLES: Final[dict[str, str]] = {
    "xid": "xid 0 79",
    "lose": "lose 0",
    "need": "need 0 gpu-reset",
    "recover": "recover 0",
    "process": "process add 0 4242 8Gi",
    "mig": "mig on 0",
    "instance": "instance make 0 2g.10gb@4",
    "making": "making 0 --takes 2s --failures 1",
    "ecc": "ecc 0 --double-bit",
    "hang": "hang 0 10s",
    "add": "add a100-40gb",
    "driver": "driver fail",
    "reboot": "reboot",
    "node": "node --json",
}
_ARGUMENTS: Final[dict[str, dict[str, Any]]] = {
    "gpu": {"metavar": "GPU", "help": "index or uuid of the GPU"},
    "code": {"metavar": "XID", "type": int, "help": "number of the XID, such as 79"},
    "action": {"metavar": "ACTION", "help": f"one of {', '.join(ACTIONS)}"},
    "board": {"metavar": "BOARD", "help": f"one of {', '.join(BOARDS)}"},
    "pid": {"metavar": "PID", "type": int, "help": "id of the process"},
    "memory": {"metavar": "MEMORY", "nargs": "?", "help": "such as 8Gi; left out: not known"},
    "seconds": {"metavar": "TIME", "help": "such as 10s"},
    "place": {"metavar": "PROFILE@START", "help": "such as 2g.10gb@4"},
    "--takes": {"metavar": "TIME", "default": "0", "help": "of each GPU instance (default: 0)"},
    "--compute-takes": {"metavar": "TIME", "default": "0", "help": "of each compute instance"},
    "--in-use": {"metavar": "TIME", "default": "0", "help": 'how long NVML says "in use"'},
    "--failures": {"metavar": "N", "type": int, "default": 0, "help": "GPU instances that fail"},
    "--compute-failures": {
        "metavar": "N",
        "type": int,
        "default": 0,
        "help": "compute instances that fail",
    },
    "--gi": {"metavar": "N", "type": int, "help": "MIG GPU instance"},
    "--ci": {"metavar": "N", "type": int, "help": "MIG compute instance in it"},
    "--sm": {
        "metavar": "PERCENT",
        "type": int,
        "default": 0,
        "help": "how busy it keeps the GPU (default: 0)",
    },
    "--count": {"metavar": "N", "type": int, "default": 1, "help": "how many (default: 1)"},
    "--double-bit": {"action": "store_true", "help": "errors that could not be corrected"},
    "--json": {"action": "store_true", "help": "for programs"},
}

_TIMES: Final = frozenset({"seconds", "takes", "compute_takes", "in_use"})


def add_arguments(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add a parser for each command; `command_from` understands what they parse."""
    for kind in get_args(AnyCommand):
        name, summary = str(kind.__struct_config__.tag), (kind.__doc__ or "").strip()
        parser = subparsers.add_parser(
            name,
            help=summary,
            description=summary,
            epilog=f"example: metagpu sim {_EXAMPLES[name]}",
        )
        parser.set_defaults(command_type=kind)

        for field in msgspec.structs.fields(kind):
            option = f"--{field.name.replace('_', '-')}"
            if field.name == "change":
                parser.add_argument("change", choices=get_args(field.type), help="what to do")
            elif option in _ARGUMENTS:
                parser.add_argument(option, **_ARGUMENTS[option])
            else:
                parser.add_argument(field.name, **_ARGUMENTS[field.name])
        if name == "node":
            parser.add_argument("--json", **_ARGUMENTS["--json"])


def command_from(args: argparse.Namespace) -> AnyCommand:
    """Make the command of what argparse understood.

    Raises:
        ConfigError: if an amount or a time in it is none.
    """
    kind: type[AnyCommand] = args.command_type
    values = {name: getattr(args, name) for name in kind.__struct_fields__}

    try:
        if values.get("memory") is not None:
            values["memory"] = int(Bytes.parse(values["memory"]))
        for name in _TIMES & values.keys():
            values[name] = float(Duration.parse(values[name]))
    except ValueError as error:
        raise ConfigError(str(error)) from None

    return kind(**values)
