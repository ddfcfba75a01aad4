"""Layout: which elements of the whole tensor each rank has.

The elements of the trusted tensor are numbered 0, 1, 2, …. A *place* is a tensor of these numbers,
in the shape of the rank's part. In most cases the shapes determine the places:

    the same shape                    the whole, on every rank          DDP, LayerNorm
    one dimension is shorter          a slice, in the order of ranks    tensor parallel, DTensor
    a vector, the sum fits            a piece of the flat tensor        ZeRO, fully sharded
    fewer rows, of a batch            the rows whose inputs are equal   data parallel

For the other cases the user gives a rule. If ranks have different rows, an output is compared only
if its dimension 0 is the batch. h_n of an LSTM, of shape (layers, B, …), is left out.
"""

from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Cut = int | Callable[[Tensor, int, int], Tensor]
"""A dimension, or ``cut(whole, rank, world_size)``, which returns the rank's part of any tensor."""


def blocks(count: int, dim: int = 0) -> Cut:
    """Return the rule to cut each of `count` equal blocks along `dim` (queries, keys, values)."""

    def cut(whole: Tensor, rank: int, world_size: int) -> Tensor:
        parts = [block.tensor_split(world_size, dim)[rank] for block in whole.chunk(count, dim)]
        return torch.cat(parts, dim)

    return cut


def places_of(
    whole: Tensor,
    parts: Sequence[Tensor | None],
    rows: Sequence[Tensor | None] | None = None,
    cut: Cut | None = None,
) -> list[Tensor | None] | None:
    """Return where the elements of each rank's part are in `whole`; None if the shapes do not fit.

    `rows` has the rows of the batch that each rank has, in the rank's order. A rank without a part
    has no place.
    """
    numbers = torch.arange(whole.numel()).view(whole.shape)
    bases = [numbers] * len(parts)
    for rank, (part, mine) in enumerate(zip(parts, rows or [None] * len(parts), strict=True)):
        if part is None or mine is None or not part.dim() or not whole.dim() or not len(mine):
            continue
        if len(part) == len(mine) and int(mine.min()) >= 0 and int(mine.max()) < len(whole):
            bases[rank] = numbers[mine]
    if callable(cut):
        cuts = [cut(base, rank, len(parts)) for rank, base in enumerate(bases)]
        return _if_all_fit(cuts, parts)
    if cut is None:
        if all(p is None or p.shape == b.shape for p, b in zip(parts, bases, strict=True)):
            return [None if p is None else b for p, b in zip(parts, bases, strict=True)]
        cut = _shorter_dimension(bases, parts)
    if cut is None:
        if any(part is not None and part.dim() != 1 for part in parts):
            return None
        bases, cut = [numbers.flatten()] * len(parts), 0
    return _tiles(bases, parts, cut)


def _shorter_dimension(bases: Sequence[Tensor], parts: Sequence[Tensor | None]) -> int | None:
    """Return the only dimension in which parts differ from the whole, if there is one."""
    found: set[int] = set()
    for base, part in zip(bases, parts, strict=True):
        if part is None:
            continue
        if part.dim() != base.dim():
            return None
        found |= {d for d in range(part.dim()) if part.shape[d] != base.shape[d]}
    return found.pop() if len(found) == 1 else None


def _tiles(
    bases: Sequence[Tensor], parts: Sequence[Tensor | None], dim: int
) -> list[Tensor | None] | None:
    """Cut each base along `dim`, one part after the other; begin again when the whole is full."""
    found: list[Tensor | None] = []
    filled: dict[tuple[int, ...], int] = {}  # ranks with different rows fill a separate whole
    for base, part in zip(bases, parts, strict=True):
        if part is None:
            found.append(None)
            continue
        rows = tuple(base.select(dim, 0).flatten().tolist()) if base.shape[dim] else ()
        start = filled.get(rows, 0)
        if start == base.shape[dim] and part.shape[dim]:
            start = 0
        stop = start + part.shape[dim]
        if stop > base.shape[dim]:
            return None
        filled[rows] = stop
        found.append(base.narrow(dim, start, part.shape[dim]))
    full = all(stop == bases[0].shape[dim] for stop in filled.values())
    return _if_all_fit(found, parts) if full else None


def _if_all_fit(
    places: Sequence[Tensor | None], parts: Sequence[Tensor | None]
) -> list[Tensor | None] | None:
    pairs = zip(places, parts, strict=True)
    found = [None if part is None else place for place, part in pairs]
    fits = all(
        part is None or (place is not None and place.shape == part.shape)
        for place, part in zip(found, parts, strict=True)
    )
    return found if fits else None


def rows_of(
    whole: Sequence[Tensor], parts: Sequence[Sequence[Tensor]]
) -> tuple[list[Tensor], list[list[Tensor]]] | None:
    """Return which rows of the batch each forward of the trusted run, and of each rank, had.

    Args:
        whole: the input of each forward of the trusted run, usually of one, shape (B, …). If the
            batch is in another dimension, it is the only one in which inputs differ.
        parts: for each rank, the input of each of its forwards; empty if it has none.

    A row that is not in the batch has the number -1. Rows are found by their values, bit for bit,
    in the dtype of the part. Equal rows are dealt to the ranks in turn. Ranks with equal inputs are
    taken to share their rows if the batch is complete without the second of them. The result is
    None if the inputs have no rows, or rows of different shapes.
    """
    every = [*whole, *(each for part in parts for each in part)]
    if not all(each.dim() == every[0].dim() > 0 for each in every):
        return None
    differ = [d for d in range(every[0].dim()) if len({each.shape[d] for each in every}) > 1]
    if len(differ) > 1:
        return None
    dim, dtype = differ[0] if differ else 0, every[-1].dtype
    rows = [[_bits(row) for row in each.to(dtype).movedim(dim, 0)] for each in whole]
    known: dict[bytes, list[int]] = {}
    for number, row in enumerate(row for each in rows for row in each):
        known.setdefault(row, []).append(number)
    sizes = [[each.shape[dim] for each in part] for part in parts]
    flat = [tuple(_bits(row) for each in p for row in each.movedim(dim, 0)) for p in parts]
    shared = Counter(row for part in set(flat) for row in part) == Counter(
        row for each in rows for row in each
    )
    dealt: dict[tuple[bytes, ...], list[int]] = {}
    found = []
    for part, lengths in zip(flat, sizes, strict=True):
        numbers = dealt.get(part) if shared else None
        if numbers is None:
            numbers = []
            for row in part:
                same = known.get(row, [-1])
                numbers.append(same[0])
                same.append(same.pop(0))  # the next of rows that are equal
        dealt[part] = numbers
        found.append(_split(torch.tensor(numbers, dtype=torch.long), lengths))
    count = torch.arange(sum(map(len, rows)))
    return _split(count, [len(each) for each in rows]), found


def _split(tensor: Tensor, sizes: list[int]) -> list[Tensor]:
    return list(tensor.split(sizes))  # type: ignore[no-untyped-call]


def _bits(row: Tensor) -> bytes:
    dense = row.clone(memory_format=torch.contiguous_format)  # a row of one element has any stride
    return bytes(dense.reshape(-1).view(torch.uint8).numpy().tobytes())
