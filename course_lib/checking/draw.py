"""`Draw`: what a case is made of. Its structure is drawn from a seed, its numbers from another.

    def draw(d):                                   one input for each rank
        late = d.rank("rank {} is late")           a rank, in some cases; the words name the case
        shape = d.one_of((3, 2), (5,), (0,))       in every case
        return [{"tensor": d.randn(*shape), "late": rank == late} for rank in d.ranks]

The structure (ranks, groups, dtypes, shapes, and what is unusual) comes from the seed of the case.
So a public case is the same for everybody, and a hidden one is the same for a whole class. The
numbers come from `Draw.numbers`, which differ in the grader.

A case has few features, so that a report can name them and a mistake shows in a case in which
nothing else is special. `Draw.maybe`, `Draw.rank` and the form of the arguments share them.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from course_lib.checking.cases import Form, InGroups

FEATURES = (0, 1, 2, 2, 3, 3)
"""How many features a case may have: each number as often as it stands here."""
_BITS = {"float16": (4, 1.0), "bfloat16": (4, 1.0), "float32": (16, 2.0**-8)}
_WIDE_BITS = (40, 2.0**-20)


@dataclass(frozen=True)
class Variety:
    """What the cases of a task may differ in, besides what its own draw says.

    Attributes:
        ranks: world sizes; a number that stands here twice is drawn twice as often.
        dtypes: dtypes of the floating-point tensors; the first one is the plain one.
        layouts: layouts of the tensors in memory, besides ``contiguous``.
        groups: whether ranks may work in two groups at once.
        calls: whether a case may follow another call on the same ranks.

    """

    ranks: Sequence[int] = (2, 3, 4, 3, 5, 1)
    dtypes: Sequence[str] = ("float32", "float64", "bfloat16")
    layouts: Sequence[str] = ("transposed", "strided")
    groups: bool = True
    calls: bool = True


class Draw(InGroups):
    """One case in the making.

    Attributes:
        world_size: the number of ranks.
        form: the form of the arguments: groups, dtype, layout and so on.
        before: ``"another"`` if the ranks make a call of another case before this one, ``"alike"``
            if they make the same call with other numbers; else empty.
        numbers: the generator of all numbers.
        words: what the case's name says besides its ranks.
        features: what is unusual in the case: the words given to `maybe` and `rank`, and its form.

    """

    def __init__(
        self,
        seed: int,
        numbers: torch.Generator,
        variety: Variety,
        form: Form | None = None,
        world_size: int | None = None,
    ) -> None:
        """Begin a case; `form` and `world_size`, if they are given, replace what is drawn."""
        self._random = random.Random(seed)
        self.numbers = numbers
        self.words: list[str] = []
        self.features: list[str] = []
        drawn_size: int = self.one_of(*variety.ranks)
        self.world_size = world_size or drawn_size
        room = self.one_of(*FEATURES)
        kinds = self._kinds(variety)
        count = min(self.one_of(0, 1, 1, 2), room, len(kinds))
        chosen = list(dict.fromkeys(self._random.sample(kinds, count)))
        self.features += chosen
        self._room = room - len(chosen)
        self.before = self.one_of("another", "alike") if "calls" in chosen else ""
        drawn = Form(
            groups=self._split() if "groups" in chosen else (),
            dtype=self.one_of(*variety.dtypes[1:]) if "dtype" in chosen else variety.dtypes[0],
            layout=self.one_of(*variety.layouts) if "layout" in chosen else "contiguous",
            iterable=self.one_of("list", "generator", "tuple") if room else "list",
            training=self.one_of(True, False) if room else True,
        )
        self.form = form or drawn

    def _kinds(self, variety: Variety) -> list[str]:
        possible = {
            "groups": variety.groups and self.world_size > 2,
            "dtype": len(variety.dtypes) > 1,
            "layout": bool(variety.layouts),
            "calls": variety.calls,
        }
        often = ("groups", "calls")  # more is wrong with these, so they are drawn twice as often
        return [kind for kind, has in possible.items() if has for _ in range(1 + (kind in often))]

    def _split(self) -> tuple[tuple[int, ...], ...]:
        """Return two groups: some ranks, and those around them; so nobody can guess a group."""
        k = self.world_size
        first = self.one_of(*range(1, k - 1)) if k > 2 else 1
        size = self.one_of(1, k // 2)
        inner = tuple(range(first, min(first + size, k)))
        return tuple(rank for rank in range(k) if rank not in inner), inner

    @property
    def ranks(self) -> range:
        """All ranks."""
        return range(self.world_size)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the case's floating-point tensors."""
        dtype: torch.dtype = getattr(torch, self.form.dtype)
        return dtype

    # Structure ------------------------------------------------------------------------------------

    def one_of(self, *choices: Any) -> Any:
        """Return one of the choices. It is not a feature: use `say` to put it into the name."""
        return self._random.choice(choices)

    def say(self, words: str) -> None:
        """Put words into the name of the case."""
        self.words.append(words)

    def maybe(self, words: str, value: Any = True, otherwise: Any = False, one_in: int = 3) -> Any:
        """Return `value` in about one of `one_in` cases, and name the case so; else `otherwise`."""
        return value if self._happens(words, words, one_in) else otherwise

    def _happens(self, feature: str, words: str, one_in: int) -> bool:
        happens = self._random.randrange(one_in) == 0 and self._room > 0
        if happens:
            self._room -= 1
            self.features.append(feature)
            self.say(words)
        return happens

    def rank(self, words: str, one_in: int = 3) -> int:
        """Return a rank to which something happens, in about one of `one_in` cases; else -1.

        `words` name the case; ``{}`` stands for the rank.
        """
        chosen: int = self.one_of(*self.ranks)
        return chosen if self._happens(words, words.format(chosen), one_in) else -1

    def unusual(self, *kinds: str) -> dict[str, int]:
        """Draw what is unusual in a case, up to three of these kinds; return kind → its rank.

        All kinds are equally likely. One that has no ``{}`` has no rank, but 0.
        """
        unusual = {}
        for kind in dict.fromkeys(self.one_of(*kinds) for _ in range(3)):
            rank = self.one_of(*self.ranks) if "{}" in kind else 0
            if self._happens(kind, kind.format(rank), one_in=1):
                unusual[kind] = rank
        return unusual

    # Numbers --------------------------------------------------------------------------------------

    def randn(self, *shape: int) -> Tensor:
        """Draw normal numbers in float64; the case's dtype rounds them."""
        return torch.randn(shape, generator=self.numbers, dtype=torch.float64)

    def exact(self, *shape: int) -> Tensor:
        """Draw numbers that need all bits of the dtype, and whose sums over 8 ranks are exact.

        Integers are larger than float64 can hold exactly.
        """
        if not self.dtype.is_floating_point:
            limit = 2 ** min(58, 8 * self.dtype.itemsize - 6)
            return torch.randint(-limit, limit, shape, generator=self.numbers).to(self.dtype)
        bits, unit = _BITS.get(self.form.dtype, _WIDE_BITS)
        return torch.randint(-(2**bits), 2**bits, shape, generator=self.numbers).double() * unit

    def whole(self, below: int, *shape: int) -> Tensor:
        """Draw integers from 0 to `below` - 1, in int64."""
        return torch.randint(below, shape, generator=self.numbers)

    def not_finite(self, tensor: Tensor) -> Tensor:
        """Return the tensor with an inf or a NaN as its first number, if it has one."""
        value = self.one_of(torch.inf, -torch.inf, torch.nan)
        tensor = tensor.clone()
        if tensor.is_floating_point():
            tensor.view(-1)[:1] = value
        return tensor
