"""`Ranks`: K ranks that run a notebook's functions together.

`Ranks` is what users see. It passes each call to an *engine*: `Processes` for ``on="cpu"`` and
``"gpu"``; `Simulated`, whose ranks are threads of one process on a fabric with a virtual clock.
"""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Callable
from typing import Any, Literal

from course_lib.ranks._torch.versions import warn_if_untried
from course_lib.ranks.calls import Call
from course_lib.ranks.costs.network import Device, Network
from course_lib.ranks.explain.arguments import argument_hint
from course_lib.ranks.explain.errors import RankError, RanksError
from course_lib.ranks.host import MAX_RANKS, Simulated
from course_lib.ranks.placement import place
from course_lib.ranks.processes.board import MAX_BOARD_RANKS
from course_lib.ranks.processes.team import Processes
from course_lib.ranks.trace.trace import Trace
from course_lib.ranks.variables import GIVEN, pull_variables, push_variables


class Ranks:
    """K ranks, ready to run functions together.

    The functions use plain ``torch.distributed``. They may be defined in notebook cells. On the
    CPU and on GPUs every rank is its own process on this machine. The process stays between calls,
    so a call costs about a millisecond. After a failure the next call works. Ranks on the CPU are
    asked to give up the failed call, and they keep their variables. Ranks that do not react, or
    that have died, are replaced by new ones.

    Simulated ranks are threads of one process, their host. The host starts with the first call of
    a notebook and serves all its simulated ranks. If a rank ends this process, the next call starts
    a new one, without the variables that the ranks kept. Each rank has its own random numbers,
    virtual time, output, arguments and classes of the notebook. It has its own settings, such as
    ``os.environ``, the working folder and the default dtype, until the call ends. The ranks share
    everything else that a process has once: imported modules and their globals.
    With three or more simulated ranks, sums differ from sums on other kinds of ranks by rounding,
    because the order of addition differs.

    Args:
        world_size: number of ranks K, from 1 to 64; with simulated ranks, from 1 to 1024.
        on: ``"cpu"`` (gloo), ``"gpu"`` (NCCL; if there are more ranks than GPUs, ranks share them),
            ``"auto"`` (GPUs if there is one for every rank, else the CPU), or ``"simulated"``.
        timeout: limit for one call, in seconds; ``None`` for no limit. It is for endless loops:
            hangs in communication are found without it.
        network: the costs of messages on simulated ranks (default: 20 µs and 10 GB/s).
        device: the costs of computation on simulated ranks. With it, every operator costs time;
            else only calls of `compute` do.
        metered: whether operations are recorded and hangs explained. If ``False``, PyTorch uses
            gloo or NCCL directly, and only the time limit ends a hang. Simulated ranks are always
            metered.

    Raises:
        ValueError: `on` or `timeout` is not valid, or so many ranks are not possible with `on`.

    Example:
        >>> from course_lib.ranks import Ranks
        >>> with Ranks(4) as ranks:
        ...     ranks.run(lambda: torch.distributed.get_rank())
        [0, 1, 2, 3]

    """

    def __init__(
        self,
        world_size: int,
        on: Literal["auto", "cpu", "gpu", "simulated"] = "auto",
        *,
        timeout: float | None = 600,
        network: Network | None = None,
        device: Device | None = None,
        metered: bool = True,
    ) -> None:
        warn_if_untried()
        number = isinstance(timeout, int | float) and not isinstance(timeout, bool)
        if timeout is not None and not (number and timeout > 0):
            raise ValueError(
                f"timeout must be above 0 seconds, or None for no limit; got {timeout!r}"
            )
        self.world_size = world_size
        self.timeout = timeout
        self.owner = uuid.uuid4().hex
        """Key of this object's variables on the ranks: see `variables`."""
        most = MAX_RANKS if on == "simulated" else MAX_BOARD_RANKS
        if not isinstance(world_size, int) or not 1 <= world_size <= most:
            raise ValueError(f"world_size must be 1 to {most}, got {world_size!r}")
        self._engine: Processes | Simulated
        if on == "simulated":
            self._engine = Simulated(world_size, self.owner, network, device)
        elif network is not None or device is not None:
            raise ValueError(
                'network=… and device=… work only with on="simulated": real ranks take the time '
                "that this machine needs"
            )
        else:
            self._engine = Processes(place(world_size, on), metered=metered)
        self._closed = False
        self._owner = os.getpid()
        self._busy = threading.Lock()
        self._calling: int | None = None
        """The thread that runs a call now."""

    @property
    def devices(self) -> list[str]:
        """The device of every rank, for example ``cuda:0``."""
        return list(self._engine.placement.devices)

    @property
    def trace(self) -> Trace:
        """The operations of the last `run`, even if that run failed."""
        return self._engine.trace

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def processes(self) -> list[int]:
        """Return the pids of the ranks, in rank order.

        The list is empty until `start` or the first call has started the ranks. It is always empty
        for simulated ranks, which are threads.
        """
        return self._engine.pids()

    def start(self) -> None:
        """Start the ranks now and return at once, so that the first `run` waits less.

        Without this call, the first `run` starts the ranks, or the host of simulated ranks.

        Raises:
            RanksError: the ranks are closed, or belong to another process.

        """
        self._refuse_if_gone()
        if self._busy.acquire(blocking=False):  # else the ranks run a call, so they have started
            try:
                self._engine.start()
            finally:
                self._busy.release()

    def run(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> list[Any]:
        """Call ``fn(*args, **kwargs)`` on every rank and return the results in rank order.

        An argument wrapped in `per_rank` gives each rank its own value. The
        function's prints and displays appear with the rank in front. Tensors arrive on the CPU.

        Raises:
            TypeError: the function or an argument cannot be sent (the call did not begin), or a
                result cannot be read here.
            ValueError: a `per_rank` argument does not have exactly one value per rank. The call did
                not begin.
            RankError: a rank raised an exception or its process died.
            DeadlockError: the ranks wait for one another.
            MismatchError: the ranks entered different collectives.
            RankTimeout: the call took longer than `timeout`.
            RanksError: the base of these five. It is raised itself if the ranks are closed, are
                busy with another call, or belong to another process.

        """
        self._refuse_if_gone()
        if not self._busy.acquire(blocking=False):
            raise RanksError(
                "these ranks are running another call: wait for its end, or make other ranks "
                "with Ranks(…)"
            )
        self._calling = threading.get_ident()
        try:
            return self._engine.run(Call(fn, args, kwargs, self.timeout))
        except RankError as error:
            error.add_detail(argument_hint(fn, args, kwargs))
            raise
        except KeyboardInterrupt as interrupt:
            # A notebook then shows only this line, not the lines of this package that led to it.
            interrupt._render_traceback_ = lambda: [  # type: ignore[attr-defined]
                "\x1b[31mKeyboardInterrupt\x1b[0m: the call on the ranks was interrupted"
            ]
            raise
        finally:
            self._calling = None
            self._busy.release()

    def _refuse_if_gone(self) -> None:
        if self._closed:
            raise RanksError("these ranks are closed; make new ones with Ranks(…)")
        if self._owner != os.getpid():
            raise RanksError("these ranks belong to another process; make new ones with Ranks(…)")

    def push(self, **values: Any) -> None:
        """Set variables of the ranks, for ``%%ranks`` cells; `per_rank` gives each its own value.

        Example:
            ``ranks.push(lr=0.1, shard=per_rank(shards))``

        Raises:
            ValueError: a name is one of those that every cell starts with, such as `rank`.
            TypeError, ValueError, RanksError: as `run`.

        """
        if reserved := values.keys() & set(GIVEN):
            raise ValueError(
                f"each %%ranks cell starts with its own {min(reserved)}: push it under another name"
            )
        self._quietly(push_variables, self.owner, **values)

    def pull(self, name: str, *other_names: str) -> list[Any]:
        """Return each rank's value of a variable, in rank order; for several names, a list of each.

        Example:
            ``losses = ranks.pull("loss")`` · ``losses, steps = ranks.pull("loss", "step")``

        Raises:
            RankError: a rank has no such variable.
            TypeError, RanksError: as `run`.

        """
        values = self._quietly(pull_variables, self.owner, (name, *other_names))
        columns = [list(column) for column in zip(*values, strict=True)]
        return columns if other_names else columns[0]

    def _quietly(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> list[Any]:
        """Run a function without a trace of its own: the trace of the previous call stays."""
        trace = self.trace
        try:
            return self.run(fn, *args, **kwargs)
        finally:
            self._engine.trace = trace

    def close(self) -> None:
        """End the ranks. Closing twice is fine.

        A call that is running in another thread raises a `RanksError` there.
        """
        self._closed = True
        if self._owner != os.getpid():
            return
        self._engine.closing.set()
        if self._calling == threading.get_ident():  # called from a signal handler during a call
            self._engine.close()
            return
        with self._busy:
            self._engine.close()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> Any:
        raise TypeError(
            "a Ranks object cannot be sent to ranks. Do not use it in the function, its class or "
            "its arguments: on a rank, call torch.distributed instead"
        )

    def __repr__(self) -> str:
        pids = self._engine.pids()
        state = "pids " + ", ".join(map(str, pids)) if pids else "start with the first call"
        state = "closed" if self._closed else state
        return f"<Ranks {self.world_size}: {self._engine.placement.why}; {state}>"
