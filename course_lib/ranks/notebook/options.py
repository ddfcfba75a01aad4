"""Parse the words after ``%ranks`` and ``%%ranks``."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from typing import Any, NoReturn, TypeVar

from course_lib.ranks.costs import presets
from course_lib.ranks.costs.network import Device, Network
from course_lib.ranks.ranks import Ranks

USAGE = (
    "%ranks K [--on auto|cpu|gpu|simulated] [--timeout SECONDS] [--network LATENCY,BANDWIDTH] "
    "[--device FLOPS]"
)
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
_PREFIX = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "p": 1e15}
_Named = TypeVar("_Named", Network, Device)
_NUMBER = r"(\d+(?:\.\d*)?(?:e[+-]?\d+)?)"


class UsageError(ValueError):
    """The line after ``%ranks`` or ``%%ranks`` cannot be read."""

    def _render_traceback_(self) -> list[str]:
        """Show only the sentence in a notebook, without a traceback."""
        return [f"\x1b[31mUsageError\x1b[0m: {self}"]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}. Usage: {USAGE}")


def make_ranks(words: list[str], variables: Mapping[str, Any]) -> Ranks:
    """Return the ranks that a line such as ``%ranks 4 --on simulated`` asks for.

    Args:
        words: the words after ``%ranks``.
        variables: the notebook's variables; a `Network` or `Device` among them may be named.

    Raises:
        UsageError: such ranks are not possible; the message says what is wrong.

    """
    parser = _Parser("%ranks", add_help=False, allow_abbrev=False)
    parser.add_argument("world_size", type=int)
    parser.add_argument("--on", default="auto", choices=("auto", "cpu", "gpu", "simulated"))
    parser.add_argument("--timeout", type=float, default=600)
    parser.add_argument("--network")
    parser.add_argument("--device")
    options = parser.parse_args(words)
    try:
        return Ranks(
            options.world_size,
            on=options.on,
            timeout=options.timeout,
            network=read_network(options.network, variables) if options.network else None,
            device=read_device(options.device, variables) if options.device else None,
        )
    except UsageError:
        raise
    except ValueError as error:
        raise UsageError(f"{error}. Usage: {USAGE}") from None


def read_network(text: str, variables: Mapping[str, Any]) -> Network:
    """Return the network that `text` names: ``20us,10GB/s``, a preset, or a variable."""
    if (named := _named(text, variables, Network)) is not None:
        return named
    latency = re.fullmatch(_NUMBER + r"\s*(s|ms|us|µs|ns)?", text.partition(",")[0].strip(), re.I)
    second = text.partition(",")[2].strip()
    rate = re.fullmatch(_NUMBER + r"\s*([kmgt]?)(B|bit|b)?(?:/s|ps)?", second, re.IGNORECASE)
    if latency is None or rate is None:
        raise UsageError(
            f"--network {text!r} is no network. Give one of these: latency and bandwidth, as in "
            f"20us,10GB/s; a preset ({', '.join(_presets(Network))}); the name of a variable that "
            "holds a Network"
        )
    bits = rate[3] is not None and rate[3] != "B"
    bandwidth = float(rate[1]) * _PREFIX[rate[2].lower()] / (8 if bits else 1)
    return Network(float(latency[1]) * _SECONDS[(latency[2] or "s").lower()], bandwidth)


def read_device(text: str, variables: Mapping[str, Any]) -> Device:
    """Return the device that `text` names: ``100TFLOPS``, a preset, or a variable."""
    if (named := _named(text, variables, Device)) is not None:
        return named
    found = re.fullmatch(_NUMBER + r"\s*([kmgtp]?)(?:flops|flop/s)?", text, re.IGNORECASE)
    if found is None:
        raise UsageError(
            f"--device {text!r} is no device. Give one of these: operations per second, as in "
            f"100TFLOPS; a preset ({', '.join(_presets(Device))}); the name of a variable that "
            "holds a Device"
        )
    return Device(flops=float(found[1]) * _PREFIX[found[2].lower()])


def _presets(kind: type[_Named]) -> dict[str, _Named]:
    return {name: value for name, value in vars(presets).items() if isinstance(value, kind)}


def _named(text: str, variables: Mapping[str, Any], kind: type[_Named]) -> _Named | None:
    """Return the notebook's variable with this name, else the preset with it, else ``None``."""
    variable = variables.get(text)
    return variable if isinstance(variable, kind) else _presets(kind).get(text.upper())


def choose(line: str, world_size: int) -> list[int]:
    """Return the ranks that ``0,2-3`` names; an empty line names all.

    Raises:
        UsageError: `line` is not a list of ranks, or some of the ranks do not exist.

    """
    if not line.strip():
        return list(range(world_size))
    chosen: set[int] = set()
    for part in line.replace(" ", ",").split(","):
        first, dash, last = part.partition("-")
        try:
            if part:
                chosen |= set(range(int(first), int(last if dash else first) + 1))
        except ValueError:
            raise UsageError(
                f"cannot read {line!r} as ranks: write their numbers, as in %%ranks 0,2-3"
            ) from None
    if not chosen or max(chosen) >= world_size:
        raise UsageError(f"ranks must be 0 to {world_size - 1}, but you wrote {line!r}")
    return sorted(chosen)
