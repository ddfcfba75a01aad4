"""Uses: how often backward adds to a gradient before it is ready.

It adds once if one backward follows one forward: autograd sums all parts of a gradient before it
calls the hook. It adds more often if several backwards run inside one (reentrant activation
checkpointing of a block that shares weights). It never adds if the loss does not depend on the
parameter.

With a *static graph*, which is the same in every step, the first backward counts the uses. Later
backwards then know which gradients are still to come, and which will never come. So ranks exchange
nothing about this, and buckets with unused parameters leave in time.
"""


class Uses:
    """Counts, for each of `count` parameters; learnt from the first backward if `learn`."""

    def __init__(self, count: int, learn: bool) -> None:
        self._expected = None if learn else [1] * count
        self._seen = [0] * count

    @property
    def learning(self) -> bool:
        """Whether the backward that comes is the one that counts."""
        return self._expected is None

    @property
    def never(self) -> list[int]:
        """The parameters known to be unused; none while `learning`."""
        return [] if self._expected is None else [i for i, n in enumerate(self._expected) if not n]

    def begin(self) -> None:
        """Count anew, for the next backward."""
        self._seen = [0] * len(self._seen)

    def add(self, index: int) -> None:
        """Count one addition to the gradient of parameter `index`."""
        self._seen[index] += 1

    def ready(self, index: int) -> bool:
        """Return whether that was the last one."""
        return self._expected is not None and self._seen[index] == self._expected[index]

    def surplus(self, index: int) -> bool:
        """Return whether that was one too many."""
        return self._expected is not None and self._seen[index] > self._expected[index]

    def missing(self) -> list[int]:
        """Return the parameters with fewer additions than expected; none while `learning`."""
        expected = self._seen if self._expected is None else self._expected
        return [
            index
            for index, (seen, due) in enumerate(zip(self._seen, expected, strict=True))
            if seen < due
        ]

    def learn(self) -> None:
        """Expect from now on what was counted, if that was to be learnt."""
        if self._expected is None:
            self._expected = list(self._seen)
