"""Find where a run on K ranks differs from one rank: the first tensor, the rank, and the pattern.

    >>> from course_lib.compare import compare, record, trusted_run
    >>> def step(x, y):  # all that it needs is made inside; on K ranks it is wrapped there
    ...     torch.manual_seed(0)
    ...     model = torch.nn.Linear(4, 1)
    ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ...     with record(model, optimizer) as recorded:
    ...         torch.nn.functional.mse_loss(model(x), y).backward()
    ...         optimizer.step()
    ...     return recorded
    >>> x, y = torch.randn(8, 4), torch.randn(8, 1)
    >>> trusted = trusted_run(lambda: step(x, y))  # on one rank, and how far its rounding goes
    >>> report = compare(trusted, [step(x, y)])  # of each rank, from `Ranks.run`
    >>> report.first is None
    True

A wrong parallel program often raises no error. It still learns, but something different. So run one
step of it and one step of a program that you trust, and compare their intermediate results. Read in
this order:

- `record`: inputs, outputs, gradients, state and parameters of a step, by name
- `layout`: which elements of the whole tensor each rank has
- `differences`: which tensors differ by more than rounding does
- `shares`: what happened to the ranks' gradients on the way
- `looks_like`: rules that describe what a difference looks like

`checksums` needs no trusted run: `compare_replicas` compares the bits of all replicas to find a
rank whose hardware computes wrong numbers.

Y. Jiang et al., "TTrace: Lightweight Error Checking and Diagnosis for Distributed Training", 2025,
arXiv 2506.09280.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from course_lib.compare.checksums import Disagreement, checksum, compare_replicas, flip_bit
from course_lib.compare.differences import Case, Difference, Runs
from course_lib.compare.layout import Cut, blocks
from course_lib.compare.looks_like import explain
from course_lib.compare.record import Record, record, trusted_run
from course_lib.compare.shares import shares_are_right


@dataclass
class Report:
    """All differences, in the order of execution. `str` returns a summary.

    Attributes:
        differences: all differences; the first is explained, and others may follow from it.
        compared: how many tensors were compared.
        left_out: tensor that was not compared → the reason.

    """

    world_size: int
    differences: list[Difference] = field(default_factory=list)
    compared: int = 0
    left_out: dict[str, str] = field(default_factory=dict)

    @property
    def first(self) -> Difference | None:
        """The first difference; None if there is none."""
        return self.differences[0] if self.differences else None

    def __str__(self) -> str:
        ranks = f"{self.world_size} rank{'s' * (self.world_size > 1)}"
        lines = [f"{self.compared} tensors of {ranks} were compared with the trusted run."]
        if self.first is None:
            lines.append("No tensor differs by more than rounding explains.")
        else:
            lines += [
                f"The first difference: {self.first}",
                f"What it looks like: {self.first.says}",
            ]
            if (later := len(self.differences) - 1) > 0:
                lines.append(f"Later differences, which may follow from the first one: {later}.")
        if self.left_out:
            name, reason = next(iter(self.left_out.items()))
            count = len(self.left_out)
            lines.append(f"Tensors that were not compared: {count}. The first is {name}: {reason}.")
        return "\n".join(lines)


def compare(
    trusted: Record, ranks: Sequence[Record], shards: Mapping[str, Cut] | None = None
) -> Report:
    """Report where the ranks' run differs from the trusted one, and what the difference looks like.

    Args:
        trusted: the result of `trusted_run` for the step on one rank.
        ranks: the result of `record` on each rank, in any order. All ranks must start from the same
            weights as the trusted run, and share its batch.
        shards: a pattern of names, such as ``"*.qkv.*"``, → a dimension or a rule (`blocks`, or a
            function), for tensors whose shapes do not show how they are cut; see `layout`.

    Raises ValueError if `trusted` has no disturbed runs, if a rank's record is missing, or if the
    ranks computed in a coarser dtype than the tolerances are made for.
    """
    if not trusted.noise:
        raise ValueError(
            "the trusted record lacks the disturbed runs needed here: make the record with "
            "trusted_run(step)"
        )
    ranks = sorted(ranks, key=lambda r: r.rank)
    world_size, numbers = ranks[0].world_size if ranks else 1, [r.rank for r in ranks]
    if numbers != list(range(world_size)):
        raise ValueError(
            f"there must be one record of each of the {world_size} ranks, got records of the ranks "
            f"{numbers}"
        )
    eps = torch.finfo(trusted.dtype).eps if trusted.dtype else trusted.coarsest()
    if max(r.coarsest() for r in ranks) > eps:
        raise ValueError(
            "the ranks computed in a coarser dtype than the trusted run, so its tolerances are too "
            "narrow for them: make the record with trusted_run(step, dtype=torch.bfloat16)"
        )
    runs = Runs(trusted, ranks, shards or {})
    candidates, compared, left_out = runs.find()
    for candidate in candidates:
        if not candidate.ranks:  # its kind has a rule of its own, which finds them
            explain(candidate, runs)
    differences = runs.with_effect([d for d in candidates if d.ranks])
    for step in {d.key.step for d in differences if d.key.kind == "output"}:
        gradient = next((d for d in differences if d.key[:2] == (step, "gradient")), None)
        if gradient is not None and shares_are_right(Case(gradient, runs, differences)):
            differences = [d for d in differences if d.key[:2] != (step, "output")]
    if differences and not differences[0].label:
        explain(differences[0], runs, differences)
    return Report(world_size, differences, compared, left_out)
