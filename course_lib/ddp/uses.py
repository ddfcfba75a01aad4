"""Uses: how often backward adds to a gradient before it is ready.

Backward adds once if one backward follows one forward: autograd sums all parts of a gradient before
it calls the hook. It adds more often if several backwards run inside one (reentrant activation
checkpointing of a block that shares weights). It never adds if the loss does not depend on the
parameter.

With a *static graph*, which is the same in every step, the first backward counts the uses. Later
backwards then know which gradients are still to come, and which will never come. So the ranks need
no messages for this, and buckets with unused parameters are sent in time.
"""


class Uses:
    """Counts the additions for each of `count` parameters.

    If `learn`, the first backward sets how many are expected; otherwise one is expected.
    """

    def __init__(self, count: int, learn: bool) -> None:
        self._expected = None if learn else [1] * count
        self._seen = [0] * count

    @property
    def learning(self) -> bool:
        """Whether the next backward is the one that sets the expected counts."""
        return self._expected is None

    @property
    def never(self) -> list[int]:
        """The parameters known to be unused; none while `learning`."""
        return [] if self._expected is None else [i for i, n in enumerate(self._expected) if not n]

    def begin(self) -> None:
        """Set all counts to zero, for the next backward."""
        self._seen = [0] * len(self._seen)

    def add(self, index: int) -> None:
        """Count one addition to the gradient of parameter `index`."""
        self._seen[index] += 1

    def ready(self, index: int) -> bool:
        """Return whether the last addition was the last expected one of this parameter."""
        return self._expected is not None and self._seen[index] == self._expected[index]

    def surplus(self, index: int) -> bool:
        """Return whether there were more additions than expected."""
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
        """Expect the current counts from now on, if `learning`."""
        if self._expected is None:
            self._expected = list(self._seen)
