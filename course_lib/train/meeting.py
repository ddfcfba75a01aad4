"""Let the ranks of a restarted run find each other, and not ranks of the previous run.

Ranks find each other through a store: each writes its address under its number. torchrun keeps one
store across restarts. So a rank that comes early could find the address of a killed rank, and fail,
or wait for half an hour (https://github.com/pytorch/pytorch/issues/135712). torchrun's count of
restarts does not help, because each machine counts its own.

So rank 0 draws a name for this start, and gives it only to ranks that are running *now*. Each rank
draws a new token, and confirms that it has read the name for that token.
"""

import time
import uuid

from torch.distributed import Store  # type: ignore[attr-defined]

_PAUSE = 0.01  # seconds


def agree_on_name(store: Store, rank: int, world_size: int, timeout: float = 600) -> str:
    """Return a name that is the same on all `world_size` ranks, and that was never used before.

    Every rank must call, with a `store` that all of them see. Earlier calls, even unfinished ones,
    may have left anything in the store, but none of their ranks may still be running.

    Raises TimeoutError on rank 0 if the others do not come within `timeout` seconds. The other
    ranks wait for as long as the store's own timeout.
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
                # This may be an old token. Then the rank's new token will replace it, and is also
                # answered.
                theirs = store.get(f"token of rank {other}").decode()
                if answered.get(other) != theirs:
                    store.set(f"name for {theirs}", token)
                    answered[other] = theirs
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"of {world_size} ranks, these did not join within {timeout:g} s: "
                f"{', '.join(map(str, sorted(missing)))}. Look at their output: they may have "
                "failed, or they cannot reach the store of rank 0"
            )
        time.sleep(_PAUSE)
    return token
