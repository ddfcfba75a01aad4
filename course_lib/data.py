"""Data for the course: a real problem that needs no download, and rows that come as a stream.

    >>> from course_lib.data import digits
    >>> train, test = digits()
    >>> len(train), len(test)
    (1438, 359)

*Digits* are 1,797 handwritten digits of 8 x 8 pixels, which are part of scikit-learn. They are
small enough to train on a laptop in seconds, and real enough to reveal a wrong training loop.

Every rank calls the same function, gets the same split, and only then takes its own shard (see
`sharding`): nothing has to be sent, and no rank ever trains on examples that another rank tests on.

*A stream* has rows in an order, but no length and no index: text from the web, for example. K ranks
with W workers each are K W readers. If nobody divides the stream, each row is trained on K W times.
Here every reader goes through the same stream and takes its own rows (`own_rows`), so each row has
one reader, and the *position*, the number of rows that all readers have taken, is all that a
checkpoint needs: any other K can go on from there. If a rank has a batch less than the others, they
wait for it in their all-reduce for ever, so the ranks agree before each step (`until_one_ends`).
Shuffling needs memory for the rows among which it chooses (`shuffled`).
"""

from collections.abc import Iterable, Iterator
from itertools import count, islice
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.utils.data import TensorDataset

Row = TypeVar("Row")

_BRIGHTEST_PIXEL = 16.0  # the digits' pixels count the dark dots in a 4 x 4 square: 0 to 16


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Return scikit-learn's handwritten digits as `(train, test)`; a fifth of them are for tests.

    Each is a `TensorDataset` of images, float32 of shape (N, 64) with values from 0 to 1, and
    labels, int64 of shape (N,) with values 0 to 9; `images, labels = train.tensors` returns both.
    Together, the two sets hold all 1,797 examples, each once, always in the same random order.

    Data: E. Alpaydin and C. Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine
    Learning Repository, 1998 (its test part, which is what scikit-learn ships).
    """
    # Imported here because it takes seconds, and most of the course needs no digits.
    from sklearn.datasets import load_digits

    pixels, classes = load_digits(return_X_y=True)
    images = torch.as_tensor(pixels, dtype=torch.float32) / _BRIGHTEST_PIXEL
    labels = torch.as_tensor(classes, dtype=torch.int64)

    # The file's own order is not random: its labels run 0, 1, 2, … 9 again and again.
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    num_test = len(labels) // 5
    test, train = order[:num_test], order[num_test:]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def own_rows(
    stream: Iterable[Row],
    rank: int,
    world_size: int,
    worker: int = 0,
    workers: int = 1,
    position: int = 0,
    batch_size: int = 1,
) -> Iterator[Row]:
    """Yield the rows of one reader: `worker` of `workers` on `rank` of `world_size`.

    The first `position` rows are left out. The next K · batch_size rows are the first step, and so
    on: rank r takes rows r, r + K, … of each step. Worker w reads the steps w, w + W, …, because a
    `DataLoader` takes a batch of `batch_size` from each worker in turn. So after s steps all ranks
    together have had the first position + s K batch_size rows. The last step may have fewer rows.

    The stream must be the same for all readers, in content and order.
    """
    rows = islice(stream, position, None)
    for step in count():
        batch = list(islice(rows, world_size * batch_size))
        if not batch:
            return
        if step % workers == worker:
            yield from batch[rank::world_size]


def shuffled(stream: Iterable[Row], size: int, generator: torch.Generator) -> Iterator[Row]:
    """Yield the rows of a stream in another order, chosen among `size` rows that wait in memory.

    A row comes at most `size` places earlier than in the stream. With the same generator all
    readers get the same order, as `own_rows` needs.
    """
    rows = iter(stream)
    waiting = list(islice(rows, size))
    for row in rows:
        place = int(torch.randint(size, (), generator=generator))
        yield waiting[place]
        waiting[place] = row
    yield from (waiting[i] for i in torch.randperm(len(waiting), generator=generator).tolist())


def until_one_ends(
    batches: Iterable[Row],
    group: dist.ProcessGroup | None = None,
    device: torch.device | str = "cpu",
) -> Iterator[Row]:
    """Yield batches until a rank of `group` has none left: all ranks yield equally many.

    Every rank asks before each batch, by an all-reduce of one number on `device` (a GPU, with
    NCCL).
    """
    nothing = object()
    iterator = iter(batches)
    while True:
        batch = next(iterator, nothing)
        all_have_one = torch.tensor(int(batch is not nothing), device=device)
        dist.all_reduce(all_have_one, dist.ReduceOp.MIN, group=group)
        if not all_have_one:
            return
        yield batch  # type: ignore[misc]
