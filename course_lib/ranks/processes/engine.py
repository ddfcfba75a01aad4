"""Ranks that are processes of this machine: the engine behind ``on="cpu"`` and ``on="gpu"``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from course_lib.ranks.calls import pack_call
from course_lib.ranks.costs.network import Network
from course_lib.ranks.explain.errors import RankState, format_states
from course_lib.ranks.placement import Placement
from course_lib.ranks.processes.messages import Answer
from course_lib.ranks.processes.object_pipe import pack
from course_lib.ranks.processes.surroundings import Surroundings
from course_lib.ranks.processes.team import Team
from course_lib.ranks.trace.trace import Trace


class Processes:
    """Keeps a team of rank processes from call to call, and replaces it when it has failed."""

    def __init__(
        self, placement: Placement, *, metered: bool = True, network: Network | None = None
    ) -> None:
        self.placement = placement
        self.world_size = len(placement.devices)
        self._trace: Trace | Callable[[], Trace] = Trace([], self.world_size)
        self.team: Team | None = None
        self._metered = metered
        self._network = network
        self._surroundings = Surroundings()

    @property
    def trace(self) -> Trace:
        """Of the last call; made when somebody looks."""
        if not isinstance(self._trace, Trace):
            self._trace = self._trace()
        return self._trace

    @trace.setter
    def trace(self, trace: Trace) -> None:
        self._trace = trace

    def start(self) -> None:
        """See `Ranks.start`."""
        self._ready_team()

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        timeout: float | None,
        check_nan: bool = False,
    ) -> list[Any]:
        """Run one call; see `Ranks.run`."""
        if check_nan and not self._metered:
            raise ValueError("check_nan=True needs metered ranks: leave metered=False out")
        common, each = pack_call(fn, args, kwargs, self.world_size, pack)
        self._trace = partial(Trace, [], self.world_size)
        try:
            team = self._ready_team()
            news = self._surroundings.news()
            if news is not None:
                team.labels.update(news[0].labels)
            return team.call(news, common, each, timeout, check_nan)
        except KeyboardInterrupt:
            self._say_interrupted()
            raise
        finally:
            for packed in (common, *each):
                packed.close()
            if self.team is not None:
                answers = [member.answer for member in self.team.members]
                self._trace = partial(_trace, answers, self.world_size, self._network)
                # Also after an interrupt, at whatever point: a half-run call leaves no good ranks.
                if not self.team.reusable:
                    self.close()

    def _ready_team(self) -> Team:
        if self.team is not None and not self.team.healthy():
            self.close()
        if self.team is None:
            self._surroundings = Surroundings()
            self.team = Team(self.placement, metered=self._metered, network=self._network)
        return self.team

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


def _trace(answers: Sequence[Answer | None], world_size: int, network: Network | None) -> Trace:
    there = [answer for answer in answers if answer is not None]
    events = [event for answer in there for event in answer.events()]
    dropped = sum(answer.head.dropped for answer in there)
    return Trace(events, world_size, dropped=dropped, network=network)
