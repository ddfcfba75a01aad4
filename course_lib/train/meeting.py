"""Where the ranks of a restarted run meet, and not those of the run before it.

Ranks find each other through a store: each leaves its address under its number. torchrun keeps one
store through its restarts, so a rank that comes early would find the address of one that was
killed, and fail, or wait for half an hour (https://github.com/pytorch/pytorch/issues/135712). The
number of restarts that torchrun tells does not help: each machine counts its own.

So rank 0 draws a name for this start, and tells it to everyone who is there *now*: to those who
come with a token that they have just drawn, and who say that they have heard.
"""

import time
import uuid

from torch.distributed import Store  # type: ignore[attr-defined]

_PAUSE = 0.01  # seconds


def agree_on_name(store: Store, rank: int, world_size: int, timeout: float = 600) -> str:
    """Return a name that is the same on all `world_size` ranks, and that no one has ever used.

    Every rank must call, with a `store` that all of them see, whatever earlier calls, also
    unfinished ones, have left in it. No rank of those may still be running.

    Raises TimeoutError on rank 0 if the others do not come within `timeout` seconds; they wait as
    long as the store lets them.
    """
    token = uuid.uuid4().hex
    if rank != 0:
        store.set(f"token of rank {rank}", token)
        name: str = store.get(f"name for {token}").decode()
        store.set(f"{name} heard by rank {rank}", "")
        return name
    deadline = time.monotonic() + timeout
    missing = set(range(1, world_size))
    answered: dict[int, str] = {}
    while missing:
        for other in sorted(missing):
            if store.check([f"{token} heard by rank {other}"]):
                missing.remove(other)
            elif store.check([f"token of rank {other}"]):
                # Perhaps an old one: then the rank's own will take its place, and is answered too.
                theirs = store.get(f"token of rank {other}").decode()
                if answered.get(other) != theirs:
                    store.set(f"name for {theirs}", token)
                    answered[other] = theirs
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"of {world_size} ranks, {sorted(missing)} did not come within {timeout:g} s"
            )
        time.sleep(_PAUSE)
    return token
