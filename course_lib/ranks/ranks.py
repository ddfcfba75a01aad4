"""`Ranks`: K ranks that run a notebook's functions together.

`Ranks` is the face; an *engine* behind it runs the calls, which `engine.make_engine` chooses.
"""

from __future__ import annotations

import os
import threading
import uuid
import weakref
from collections.abc import Callable
from typing import Any, Literal

from course_lib.ranks.calls import Call, CallOptions
from course_lib.ranks.costs.network import Device, Network
from course_lib.ranks.engine import make_engine
from course_lib.ranks.explain.errors import RanksError
from course_lib.ranks.output.summary import html_table, one_line
from course_lib.ranks.simulated.threads import Computation, Misuse
from course_lib.ranks.trace.trace import Trace
from course_lib.ranks.variables import forget_variables, pull_variables, push_variables

__all__ = ["Ranks"]


class Ranks:
    """K ranks, ready to run functions together.

    The functions use plain ``torch.distributed``; they may be defined in notebook cells. On the
    CPU and on GPUs every rank is its own process on this machine; it stays between calls, so a
    call costs about a millisecond. After a failure the next call works. Ranks on the CPU are told
    to give the failed call up, and keep their variables. Those that do not listen, or have died,
    are replaced by fresh ones.

    Simulated ranks are threads of the notebook's process. Each has its own random numbers, virtual
    time, output, arguments and classes of the notebook. All else that a process has once, such as
    ``os.environ``, the working folder and the globals of imported modules, they share with one
    another and with the notebook. Where that matters, ``isolated=True`` makes each a process. From
    three ranks on, sums differ from those of other kinds of ranks by rounding: the order differs.

    Args:
        world_size: number of ranks K, 1 to 64; simulated ones, 1 to 1024.
        on: ``"cpu"`` (gloo), ``"gpu"`` (NCCL; more ranks than GPUs share them), ``"auto"``: GPUs
            if there is one for every rank, else the CPU; or ``"simulated"``.
        timeout: limit for one call, in seconds; ``None`` for none. Hangs in communication are
            found without it; it is for endless loops.
        network: what messages cost: on simulated ranks (default: 20 µs and 10 GB/s), or on CPU
            ranks, which emulate it in real time.
        device: what computation costs on simulated ranks.
        computation: how that cost is found there; see `course_lib.ranks.costs.computation`.
        metered: whether operations are recorded and hangs explained. Without it, PyTorch talks
            to gloo or NCCL directly, and only the time limit ends a hang. Simulated ranks always
            are.
        misuse: on simulated ranks, what happens when a rank never waits for a handle, or touches
            a buffer before ``wait()``: ``"warn"``, ``"error"``, or ``"ignore"``.
        isolated: whether simulated ranks are processes, which share nothing; at most 64.

    Raises:
        ValueError: `on` or `timeout` is not valid, or so many ranks are not possible there.

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
        computation: Computation | None = None,
        metered: bool = True,
        misuse: Misuse = "warn",
        isolated: bool = False,
    ) -> None:
        number = isinstance(timeout, int | float) and not isinstance(timeout, bool)
        if timeout is not None and not (number and timeout > 0):
            raise ValueError(
                f"timeout must be above 0 seconds, or None for no limit; got {timeout!r}"
            )
        self.world_size = world_size
        self.timeout = timeout
        self._engine = make_engine(
            world_size, on, network, device, computation, metered, misuse, isolated
        )
        self._closed = False
        self._owner = os.getpid()
        self._busy = threading.Lock()
        self._calling: int | None = None
        """The thread that runs a call now."""
        self.owner = uuid.uuid4().hex
        """Tells this object's variables on the ranks from those of others: see `variables`."""
        self.error: RanksError | None = None
        """The error about the ranks that the last `run` raised; ``None`` if it went well."""
        self._forget = weakref.finalize(self, forget_variables, self.owner)

    @property
    def devices(self) -> list[str]:
        """The device of every rank, for example ``cuda:0``."""
        return list(self._engine.placement.devices)

    @property
    def trace(self) -> Trace:
        """The operations of the last `run`, also of one that failed."""
        return self._engine.trace

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def processes(self) -> list[int]:
        """Return the pids of the ranks, in rank order.

        Empty before they start, with `start` or the first call, and on simulated ranks, which are
        threads.
        """
        return self._engine.pids()

    def start(self) -> None:
        """Start the ranks now, and return at once: the first `run` then has less to wait for.

        Without this call, the first `run` starts the ranks. Simulated ranks have nothing to start.

        Raises:
            RanksError: the ranks are closed, or belong to another process.

        """
        self._refuse_if_gone()
        if self._busy.acquire(blocking=False):  # else they run a call, and so have started
            try:
                self._engine.start()
            finally:
                self._busy.release()

    def run(
        self, fn: Callable[..., Any], /, *args: Any, check_nan: bool = False, **kwargs: Any
    ) -> list[Any]:
        """Call ``fn(*args, **kwargs)`` on every rank and return the results in rank order.

        An argument wrapped in `per_rank` gives each rank its own value. The
        function's prints and displays appear with the rank in front. Tensors arrive on the CPU.

        With ``check_nan=True`` a rank that puts NaN into a collective or a message fails there: the
        first one names the rank and the line.

        Raises:
            TypeError: the function or an argument cannot be sent, and nothing was started; or a
                result cannot be read here.
            ValueError: a `per_rank` argument has not one value per rank, or `check_nan` is used
                with ``metered=False``; nothing was started.
            RankError: a rank raised an exception or its process died.
            DeadlockError: the ranks wait for one another.
            MismatchError: the ranks entered different collectives.
            RankTimeout: the call took longer than `timeout`.
            MisuseError: handles were misused, with ``misuse="error"``.
            RanksError: the base of these five. It is raised itself if the ranks are closed, are
                busy with another call, or belong to another process.

        """
        self._refuse_if_gone()
        if not self._busy.acquire(blocking=False):
            raise RanksError(
                "these ranks are running another call: wait for its end, or make other ranks "
                "with Ranks(…)"
            )
        self.error = None
        self._calling = threading.get_ident()
        try:
            return self._engine.run(Call(fn, args, kwargs, CallOptions(self.timeout, check_nan)))
        except RanksError as error:
            self.error = error
            raise
        except KeyboardInterrupt as interrupt:
            # A notebook then shows this line and not those of this package that led to it.
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
        """Set variables of the ranks, for ``%%ranks`` cells; a `per_rank` gives each its own.

        Example:
            ``ranks.push(lr=0.1, shard=per_rank(shards))``

        Raises:
            TypeError, ValueError, RanksError: as `run`.

        """
        self._quietly(push_variables, self.owner, **values)

    def pull(self, name: str, *more: str) -> list[Any]:
        """Return the ranks' values of a variable, in rank order; of several, a list for each.

        Example:
            ``losses = ranks.pull("loss")`` · ``losses, steps = ranks.pull("loss", "step")``

        Raises:
            RankError: a rank has no such variable.
            TypeError, RanksError: as `run`.

        """
        values = self._quietly(pull_variables, self.owner, (name, *more))
        each = [list(column) for column in zip(*values, strict=True)]
        return each if more else each[0]

    def _quietly(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> list[Any]:
        """Run a function whose trace nobody wants: that of the call before stays."""
        trace = self.trace
        try:
            return self.run(fn, *args, **kwargs)
        finally:
            self._engine.trace = trace

    def close(self) -> None:
        """End the ranks. Closing twice is fine.

        A call that runs meanwhile, in another thread, raises a `RanksError` there.
        """
        self._closed = True
        self._forget()
        if self._owner != os.getpid():
            return
        self._engine.closing.set()
        if self._calling == threading.get_ident():  # from a handler of a signal
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
        return one_line(self._engine.placement, self._engine.pids(), self._closed)

    def _repr_html_(self) -> str:
        return html_table(self._engine.placement, self._engine.pids(), self._closed)
