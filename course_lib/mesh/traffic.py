"""Formulas for a rank of a mesh: the weights it holds, and the bytes it sends along each axis.

    >>> from course_lib.mesh import Shape, traffic
    >>> sent = traffic(Shape(), batch=8, data=2, tensor=2)
    >>> {axis: f"{nbytes:.0f} bytes" for axis, nbytes in sent.items() if nbytes}
    {'tensor': '65536 bytes', 'data': '32256 bytes'}

With D, P, X, T ranks along data, pipeline, expert and tensor, and n the bytes of a rank's
activations between two layers (its batch × length × width numbers, all micro-batches together):

    tensor      L/P layers · 4 all-reduces of n      each 2 (T-1)/T n     (of k n, for experts)
    expert      L/P layers · 4 all-to-alls of k n    each (X-1)/X k n     and the counts before
    pipeline    (P-1)/P boundaries per rank          each 2 n             forward and backward
    data        an all-reduce of the gradients       2 (DX-1)/DX Ψ        Ψ bytes of gradients

So tensor and expert send for every layer, and pipeline for every boundary. Data sends once, and its
bytes do not grow with the batch. All numbers are means over the ranks: if sizes do not divide, the
first ranks hold more than the last.

M. Shoeybi et al., "Megatron-LM", 2019, section 3; D. Narayanan et al., SC 2021, section 3.
"""

from collections.abc import Mapping

from course_lib.mesh.axes import AXES
from course_lib.mesh.transformer import Shape


def weights_held(shape: Shape, **sizes: int) -> tuple[float, float]:
    """Return the mean number of weights that a rank holds: ``(dense, experts')``.

    `sizes` are the sizes of the mesh's axes, as for `make_mesh`.
    """
    _, pipeline, expert, tensor = _of(sizes)
    w, hidden = shape.width, shape.hidden
    mlp, mlp_whole = 2 * w * hidden + hidden, w  # cut along tensor; not cut: the sum's bias
    cut, uncut = 4 * w * w + 3 * w, 5 * w  # attention; its last bias and two norms
    if shape.experts:
        uncut += (w + 1) * shape.experts  # the router
    else:
        cut, uncut = cut + mlp, uncut + mlp_whole
    ends = (2 * shape.words + shape.length + 2) * w
    dense = shape.layers * (cut / tensor + uncut) + ends
    experts = shape.layers * shape.experts * (mlp / tensor + mlp_whole) / expert
    return dense / pipeline, experts / pipeline


def traffic(
    shape: Shape, batch: int, micro_batches: int = 1, *, itemsize: int = 4, **sizes: int
) -> dict[str, float]:
    """Return axis → the mean number of bytes that a rank sends along it in a step.

    `batch` is the number of rows of all ranks together. The pipeline has one stage for each rank,
    and every weight is trained. The result for `expert` assumes that all experts get equally many
    tokens. `itemsize` is the bytes of a number. The experts' all-reduce along data counts as data.
    """
    data, pipeline, expert, tensor = _of(sizes)
    routes = shape.top_k if shape.experts else 1
    layers = shape.layers / pipeline
    n = batch / (data * expert) * shape.length * shape.width * itemsize
    sent = {"tensor": layers * (2 + 2 * routes) * _ring(tensor) * n}
    counts = 8 * shape.experts * micro_batches  # 8 bytes each
    sent["expert"] = layers * (4 * routes * n + counts) * (expert - 1) / expert
    sent["pipeline"] = 2 * n * (pipeline - 1) / pipeline
    if not shape.experts:
        sent["expert"] = 0.0
    dense, experts = weights_held(shape, **sizes)
    sent["data"] = itemsize * (_ring(data * expert) * dense + _ring(data) * experts)
    return sent


def _ring(ranks: int) -> float:
    """Return 2 (K-1)/K, the bytes that a rank sends in an all-reduce per byte of the tensor."""
    return 2 * (ranks - 1) / ranks


def _of(sizes: Mapping[str, int]) -> tuple[int, int, int, int]:
    data, pipeline, expert, tensor = (sizes.get(axis, 1) for axis in AXES)
    return data, pipeline, expert, tensor
