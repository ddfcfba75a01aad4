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
    whole_tensor: Tensor,
    parts: Sequence[Tensor | None],
    rows: Sequence[Tensor | None] | None = None,
    cut: Cut | None = None,
) -> list[Tensor | None] | None:
    """Return where the elements of each rank's part are; None if the shapes do not fit.

    `rows` has the rows of the batch that each rank has, in the rank's order. A rank without a part
    has no place.
    """
    numbers = torch.arange(whole_tensor.numel()).view(whole_tensor.shape)
    bases = [numbers] * len(parts)
    for rank, (part, own_rows) in enumerate(zip(parts, rows or [None] * len(parts), strict=True)):
        if part is None or own_rows is None or not part.dim() or not numbers.dim():
            continue
        if len(part) == len(own_rows) > 0 and set(own_rows.tolist()) <= set(range(len(numbers))):
            bases[rank] = numbers[own_rows]
    if callable(cut):
        return _if_all_fit([cut(base, k, len(parts)) for k, base in enumerate(bases)], parts)
    if cut is None:
        if (places := _if_all_fit(bases, parts)) is not None:
            return places
        cut = _shorter_dimension(bases, parts)
    if cut is None:
        if any(part is not None and part.dim() != 1 for part in parts):
            return None
        bases, cut = [numbers.flatten()] * len(parts), 0
    return _tiles(bases, parts, cut)


def _shorter_dimension(bases: Sequence[Tensor], parts: Sequence[Tensor | None]) -> int | None:
    """Return the only dimension in which parts differ from the whole, if there is one."""
    shorter: set[int] = set()
    for base, part in zip(bases, parts, strict=True):
        if part is None:
            continue
        if part.dim() != base.dim():
            return None
        shorter |= {d for d in range(part.dim()) if part.shape[d] != base.shape[d]}
    return shorter.pop() if len(shorter) == 1 else None


def _tiles(
    bases: Sequence[Tensor], parts: Sequence[Tensor | None], dim: int
) -> list[Tensor | None] | None:
    """Cut each base along `dim`, one part after the other; begin again when the whole is full."""
    tiles: list[Tensor | None] = []
    filled: dict[tuple[int, ...], int] = {}  # ranks with different rows fill a separate whole
    for base, part in zip(bases, parts, strict=True):
        if part is None:
            tiles.append(None)
            continue
        rows = tuple(base.select(dim, 0).flatten().tolist()) if base.shape[dim] else ()
        start = filled.get(rows, 0)
        if start == base.shape[dim] and part.shape[dim]:
            start = 0
        stop = start + part.shape[dim]
        if stop > base.shape[dim]:
            return None
        filled[rows] = stop
        tiles.append(base.narrow(dim, start, part.shape[dim]))
    full = all(stop == bases[0].shape[dim] for stop in filled.values())
    return _if_all_fit(tiles, parts) if full else None


def _if_all_fit(
    places: Sequence[Tensor | None], parts: Sequence[Tensor | None]
) -> list[Tensor | None] | None:
    """Return the place of each part if all have the part's shape, else None."""
    fitting: list[Tensor | None] = []
    for place, part in zip(places, parts, strict=True):
        if part is not None and (place is None or place.shape != part.shape):
            return None
        fitting.append(None if part is None else place)
    return fitting


def rows_of(
    inputs: Sequence[Tensor], parts: Sequence[Sequence[Tensor]]
) -> tuple[list[Tensor], list[list[Tensor]]] | None:
    """Return which rows of the batch each forward of the trusted run, and of each rank, had.

    Args:
        inputs: the input of each forward of the trusted run, usually of one, shape (B, …). If the
            batch is in another dimension, it is the only one in which inputs differ.
        parts: for each rank, the input of each of its forwards; empty if it has none.

    A row that is not in the batch has the number -1. Rows are found by their values, bit for bit,
    in the dtype of the part. Equal rows are dealt to the ranks in turn. Ranks with equal inputs are
    taken to share their rows if the batch is complete without the second of them. The result is
    None if the inputs have no rows, or rows of different shapes.
    """
    tensors = [*inputs, *(tensor for part in parts for tensor in part)]
    if not all(tensor.dim() == tensors[0].dim() > 0 for tensor in tensors):
        return None
    dims = range(tensors[0].dim())
    differ = [d for d in dims if len({tensor.shape[d] for tensor in tensors}) > 1]
    if len(differ) > 1:
        return None
    dim, dtype = differ[0] if differ else 0, tensors[-1].dtype
    batch = [_bits(row) for tensor in inputs for row in tensor.to(dtype).movedim(dim, 0)]
    numbers_of: dict[bytes, list[int]] = {}
    for number, row in enumerate(batch):
        numbers_of.setdefault(row, []).append(number)
    flat = [tuple(_bits(row) for t in part for row in t.movedim(dim, 0)) for part in parts]
    shared = Counter(row for part in set(flat) for row in part) == Counter(batch)
    dealt: dict[tuple[bytes, ...], list[int]] = {}
    rows = []
    for part, forwards in zip(flat, parts, strict=True):
        if not shared or part not in dealt:
            dealt[part] = []
            for row in part:
                equal = numbers_of.get(row, [-1])
                dealt[part].append(equal[0])
                equal.append(equal.pop(0))  # the next of rows that are equal
        rows.append(_split(torch.tensor(dealt[part], dtype=torch.long), forwards, dim))
    return _split(torch.arange(len(batch)), inputs, dim), rows


def _split(numbers: Tensor, tensors: Sequence[Tensor], dim: int) -> list[Tensor]:
    """Cut the numbers of rows into those of each tensor."""
    return list(numbers.split([t.shape[dim] for t in tensors]))  # type: ignore[no-untyped-call]


def _bits(row: Tensor) -> bytes:
    dense = row.clone(memory_format=torch.contiguous_format)  # a row of one element has any stride
    return bytes(dense.reshape(-1).view(torch.uint8).numpy().tobytes())
