"""Ranks that are processes of this machine: the engine behind ``on="cpu"`` and ``on="gpu"``."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from course_lib.ranks.calls import cell_labels, cell_sources, pack_call
from course_lib.ranks.costs.network import Network
from course_lib.ranks.explain.errors import RankState, format_states
from course_lib.ranks.placement import Placement
from course_lib.ranks.processes.object_pipe import pack
from course_lib.ranks.processes.team import Team
from course_lib.ranks.trace.trace import Trace

# Set for the fork server, and so for the ranks; the notebook's own values are not for them.
_NOT_SENT = (
    *("GLOO_SOCKET_IFNAME", "OPENBLAS_NUM_THREADS", "MPLBACKEND", "PYTHONUNBUFFERED"),
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    "TORCH_FR_BUFFER_SIZE",
)


class Processes:
    """Keeps a team of rank processes from call to call, and replaces it when it has failed."""

    def __init__(
        self, placement: Placement, *, metered: bool = True, network: Network | None = None
    ) -> None:
        self.placement = placement
        self.world_size = len(placement.devices)
        self.trace = Trace([], self.world_size)
        self.team: Team | None = None
        self._metered = metered
        self._network = network
        self._known: set[str] = set()
        self._around: tuple[Any, ...] | None = None
        self._raw: dict[Any, Any] = {}
        self._decoded: dict[str, str] = {}

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        timeout: float | None,
    ) -> list[Any]:
        """Run one call; see `Ranks.run`."""
        common, each = pack_call(fn, args, kwargs, self.world_size, pack)
        self.trace = Trace([], self.world_size)
        try:
            team = self._ready_team()
            surroundings = self._surroundings()
            team.labels.update(cell_labels())
            return team.call(surroundings, common, each, timeout)
        except KeyboardInterrupt:
            self._say_interrupted()
            raise
        finally:
            for packed in (common, *each):
                packed.close()
            if self.team is not None:
                self.trace = _trace(self.team, self._network)
                # Also after an interrupt, at whatever point: a half-run call leaves no good ranks.
                if not self.team.reusable:
                    self.close()

    def _ready_team(self) -> Team:
        if self.team is not None and not self.team.healthy():
            self.close()
        if self.team is None:
            self._known, self._around = set(), None
            self.team = Team(self.placement, metered=self._metered, network=self._network)
        return self.team

    def _surroundings(self) -> tuple[Any, ...] | None:
        """Return what has changed around the calls since the last one, for the ranks to adopt."""
        sources = cell_sources(self._known)
        self._known |= sources.lines.keys()
        try:
            folder = os.getcwd()
        except FileNotFoundError:
            folder = ""
        environment = self._environment()
        around = (folder, list(sys.path), environment)
        if not sources.lines and (sources.labels, around) == self._around:
            return None
        self._around = sources.labels, around
        return (sources, *around)

    def _environment(self) -> dict[str, str]:
        """Return the notebook's environment; decoding it anew for every call would show."""
        raw = dict(getattr(os.environ, "_data", os.environ))
        if raw != self._raw:
            self._raw = raw
            self._decoded = {k: v for k, v in os.environ.items() if k not in _NOT_SENT}
        return self._decoded

    def _say_interrupted(self) -> None:
        team = self.team
        if team is not None and len(team.members) == self.world_size:
            table = format_states(team.interrupted or team.watch.states())
            now = "The ranks stay" if team.reusable else "The ranks are ended"
            print(f"Interrupted. {now}; they were:\n\n{table}\n", file=sys.stderr)

    def states(self) -> list[RankState]:
        """Return what the ranks do now; empty if none runs."""
        return self.team.watch.states() if self.team is not None else []

    def pids(self) -> list[int]:
        """Return the processes of the ranks, in rank order; empty if none runs."""
        return [member.pid for member in self.team.members] if self.team is not None else []

    def close(self) -> None:
        """End the processes; the next `run` would start new ones."""
        if self.team is not None:
            self.team.end()
            self.team = None


def _trace(team: Team, network: Network | None) -> Trace:
    events = [event for member in team.members for event in member.events]
    dropped = sum(member.dropped for member in team.members)
    return Trace(events, team.world_size, dropped=dropped, network=network)
