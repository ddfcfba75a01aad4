"""Ranks that are processes, on the grader's network: `run` and `trace` as those of `Ranks`."""

import contextlib
import socket
import tempfile
import threading
from pathlib import Path

from autograder.course import Settings
from autograder.examination._channel import Channel
from autograder.examination.budget import Budget, Deadline
from autograder.examination.case import Exchange
from autograder.examination.fabric import ExaminersFabric
from autograder.inside.fabric_client import FabricClient, FabricStopped
from course_lib.ranks.calls import per_rank
from course_lib.ranks.costs.network import Network
from course_lib.ranks.explain.errors import RanksError
from course_lib.ranks.for_graders import lone_rank
from course_lib.ranks.trace.trace import Trace
from course_lib.ranks.wire import encode, receive, send


class Carrying(threading.Thread):
    """A thread that carries the messages of a run; `error` is the run's error."""

    def __init__(self, ends, network: Network) -> None:
        super().__init__(daemon=True)

        def tell(rank: int, kind: str, value) -> None:
            channels[rank].send(kind, value)

        self.fabric = ExaminersFabric(len(ends), network, tell)
        channels = [Channel(end, self.fabric.bounds.message) for end in ends]
        self._channels = channels
        self.exchange = Exchange(channels, self.fabric)
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            with Budget(Settings(submission_seconds=1000)) as budget:
                self.exchange.run(Deadline(budget, 300))
        except BaseException as error:
            self.error = error
        finally:
            for channel in self._channels:
                channel.close()


def on_rank(path: str, world_size: int, rank: int, fn, *args):
    """Call a function as a rank of the grader's network, and tell the grader how it ends."""
    with socket.socket(socket.AF_UNIX) as channel:
        channel.connect(path)
        channel.sendall(bytes([rank]))
        with contextlib.suppress(FabricStopped), lone_rank(FabricClient(channel), rank, world_size):
            send(channel, ("ready", None))
            receive(channel)
            ending = "output", encode(None)
            try:
                return fn(*args)
            except Exception as error:
                ending = "failure", {"kind": type(error).__name__, "message": str(error)}
                raise
            finally:
                with contextlib.suppress(OSError):
                    send(channel, ending)


class CarriedRanks:
    def __init__(self, processes) -> None:
        self._processes = processes
        self._k = processes.world_size
        self.network = Network(20e-6, 10e9)
        self.trace = Trace([], self._k)

    def run(self, fn, *args):
        carrying: list[Carrying] = []
        with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
            path = str(Path(folder) / "fabric")
            listener.bind(path)
            listener.listen(self._k)

            def accept() -> None:
                ends = [listener.accept()[0] for _ in range(self._k)]
                ends.sort(key=lambda end: end.recv(1))
                carrying.append(Carrying(ends, self.network))

            accepting = threading.Thread(target=accept, daemon=True)
            accepting.start()
            ranks, failure = per_rank(range(self._k)), None
            try:
                results = self._processes.run(on_rank, path, self._k, ranks, fn, *args)
            except RanksError as error:
                failure = error
            accepting.join(30)
        carrying[0].join(30)
        if carrying[0].error is not None:
            raise carrying[0].error from failure
        if failure is not None:
            raise failure
        self.trace = Trace(carrying[0].fabric.fabric.events, self._k)
        return results
