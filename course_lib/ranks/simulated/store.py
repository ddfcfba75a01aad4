"""The default store of simulated ranks. All ranks share it, and its waits let other ranks run."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from course_lib.ranks._torch.thread_worlds import here
from course_lib.ranks.simulated.operation import STORE, Operation


class SimulatedStore(dist.Store):  # type: ignore[misc,name-defined]
    """A key-value store in this process, the same for all ranks of one world.

    Accesses happen in the order of virtual time. A wait for a key that no rank sets is reported as
    a deadlock. So time limits are not needed, and the store ignores them.
    """

    def __init__(self, world_size: int) -> None:
        super().__init__()
        self._world = tuple(range(world_size))
        self._data: dict[str, bytes] = {}
        self._waiting: list[tuple[set[str], Operation]] = []

    def _await(self, keys: Sequence[str]) -> None:
        context: Any = here()
        context.endpoint.in_turn()
        missing = set(keys) - self._data.keys()
        if missing:
            # PyTorch puts the name of the group in front of the key.
            names = ", ".join(repr(key.rpartition("//")[2]) for key in sorted(missing))
            where = context.locate()
            operation = Operation(
                context.rank, STORE, "", self._world, [], [], op=names, where=where
            )
            self._waiting.append((missing, operation))
            context.endpoint.wait(operation)

    def _put(self, key: str, value: bytes) -> None:
        self._data[key] = value
        for keys, operation in self._waiting:
            keys.discard(key)
            if not keys:
                _endpoint().release(operation)
        self._waiting = [each for each in self._waiting if each[0]]

    def set(self, key: str, value: Any) -> None:
        _endpoint().in_turn()
        self._put(key, _as_bytes(value))

    def get(self, key: str) -> bytes:
        self._await([key])
        return self._data[key]

    def add(self, key: str, value: int) -> int:
        _endpoint().in_turn()
        total = int(self._data.get(key, b"0")) + value
        self._put(key, str(total).encode())
        return total

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        _endpoint().in_turn()
        there = self._data.get(key)
        if there == _as_bytes(expected) or (there is None and not _as_bytes(expected)):
            self._put(key, _as_bytes(desired))
        return self._data.get(key, _as_bytes(expected))

    def append(self, key: str, value: Any) -> None:
        _endpoint().in_turn()
        self._put(key, self._data.get(key, b"") + _as_bytes(value))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._await(keys)

    def check(self, keys: Sequence[str]) -> bool:
        _endpoint().in_turn()
        return all(key in self._data for key in keys)

    def delete_key(self, key: str) -> bool:
        _endpoint().in_turn()
        return self._data.pop(key, None) is not None

    def num_keys(self) -> int:
        _endpoint().in_turn()
        return len(self._data)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        self._await(keys)
        return [self._data[key] for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[Any]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def has_extended_api(self) -> bool:
        return True

    def clone(self) -> SimulatedStore:
        return self


def _endpoint() -> Any:
    """Return the endpoint of this thread's rank: `baton.ThreadEndpoint`."""
    return here().endpoint


def _as_bytes(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
