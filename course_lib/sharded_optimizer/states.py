"""Build the whole optimizer state from its pieces, and the pieces from the whole state.

The saved state has the form of a single process: for parameter i, tensors of its shape (momentum,
variance) and numbers (how many steps). So a run can continue with a different number of ranks, with
a different kind of sharding, or without sharding.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.bucketing import Bucket
from course_lib.collectives import Group, place_in
from course_lib.sharded_optimizer.partition import FlatChunks, all_gather_chunks, as_it_lies

State = dict[str, Any]


def gather_states(
    states: Sequence[State], params: Sequence[Tensor], buffers: Sequence[FlatChunks], group: Group
) -> dict[int, State]:
    """Return the states of whole parameters, by number, from each rank's `states` of its pieces.

    It takes one all-gather for each buffer and name. All ranks of `group` must call.
    """
    full_states: dict[int, State] = {}
    kinds: dict[tuple[int, str], torch.dtype] = {}
    everyone: list[Any] = [None] * place_in(group)[1]
    dist.all_gather_object(everyone, [_described(state) for state in states], group=group)
    for described in everyone:
        for number, (plain, tensors) in enumerate(described):
            if plain or tensors:
                full_states.setdefault(number, {}).update(plain)
            kinds.update({(number, name): dtype for name, dtype in tensors.items()})
    for chunks in buffers:
        for name in dict.fromkeys(name for number, name in kinds if number in chunks.indices):
            members = [i for i in chunks.indices if (i, name) in kinds]
            flat = torch.zeros_like(chunks.flat, dtype=kinds[members[0], name])
            for i in members:
                if name in states[i]:
                    chunks.piece(i, chunks.chunk(flat)).copy_(states[i][name])
            all_gather_chunks(flat, group)
            places = Bucket(params, chunks.indices, flat[: len(chunks.bucket.buffer)])
            for i, view in zip(chunks.indices, places.views, strict=True):
                if i in members:
                    full_states[i][name] = view.clone()
    return full_states


def pieces_of_states(
    full_states: dict[int, State], params: Sequence[Tensor], buffers: Sequence[FlatChunks]
) -> dict[int, State]:
    """Return the state of each piece that this rank has, by the parameter's number.

    Raises ValueError if a tensor of the state has not the shape of its whole parameter.
    """
    own_states: dict[int, State] = {}
    for chunks in buffers:
        for i in chunks.indices:
            first, last = chunks.pieces[i]
            cut = {
                name: (
                    as_it_lies(value, params[i])[first:last].clone()
                    if _of_elements(name, value, params[i])
                    else value
                )
                for name, value in full_states.get(i, {}).items()
            }
            if cut and first < last:
                own_states[i] = cut
    return own_states


def _of_elements(name: str, value: Any, param: Tensor) -> bool:
    # The number of steps is a tensor without dimensions, but a parameter may be one, too.
    if not isinstance(value, Tensor) or name == "step":
        return False
    if value.dim() > 0 and value.shape != param.shape:
        raise ValueError(
            f"'{name}' of a parameter of shape {tuple(param.shape)} has the shape "
            f"{tuple(value.shape)}: this is the state of one rank, not the whole state, which "
            "ShardedOptimizer.state_dict() or full_optimizer_state() return"
        )
    return value.shape == param.shape


def _described(state: State) -> tuple[State, dict[str, torch.dtype]]:
    """Return the state of the parameter as a whole, and the dtypes of its per-element tensors."""
    tensors = {k: v.dtype for k, v in state.items() if isinstance(v, Tensor) and v.dim() > 0}
    return {k: v for k, v in state.items() if k not in tensors}, tensors
