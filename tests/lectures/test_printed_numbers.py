"""Numbers that lectures print, and draw conclusions from, against mathematics or PyTorch."""

import math
import re

import nbformat
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from course_lib.data import digits
from course_lib.mesh import transformer
from course_lib.pipeline_parallel import (
    interleaved,
    one_forward_one_backward,
    peak_activations,
)
from course_lib.running_model import SHAPE
from tests.helpers import ROOT


def printed(lecture: str, cell: str) -> str:
    """Return what a cell of a lecture printed when the page was committed."""
    nb = nbformat.read(ROOT / "lectures" / f"{lecture}.ipynb", as_version=4)
    (found,) = (each for each in nb.cells if each.id == cell)
    return "".join(out.text for out in found.outputs if out.output_type == "stream")


def row(text: str, name: str) -> list[float]:
    """Return the numbers of the line that begins with `name`."""
    (line,) = (line for line in text.splitlines() if line.startswith(name))
    return [float(number) for number in re.findall(r"\d+(?:\.\d+)?", line[len(name) :])]


def test_02_angles_of_the_ranks_gradients_to_their_mean():
    images, labels = digits()[0].tensors
    torch.manual_seed(0)
    hidden = [nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh()]
    model = nn.Sequential(*hidden, nn.Linear(512, 10))

    def gradient(rows: slice) -> torch.Tensor:
        loss = F.cross_entropy(model(images[rows]), labels[rows])
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, model.parameters())])

    mean = gradient(slice(0, 64))
    cosines = [F.cosine_similarity(gradient(slice(a, a + 16)), mean, 0) for a in (0, 16, 32, 48)]
    degrees = [round(math.degrees(math.acos(float(cosine)))) for cosine in cosines]
    text = printed("02_data_parallel_sgd", "cell-22")
    assert row(text, "angles to the mean, ranks 0 to 3:") == degrees


def distances(rate, steps):
    """Return the distance to the minimum with top-1 of two numbers, two ranks, and feedback."""
    w, residuals = [3.0, 1.0], [[0.0, 0.0], [0.0, 0.0]]
    path = []
    for t in range(steps):
        total = [0.0, 0.0]
        for residual, push in zip(residuals, (10.0, -10.0), strict=True):
            residual[0] += w[0] + push
            residual[1] += w[1]
            largest = 0 if abs(residual[0]) >= abs(residual[1]) else 1
            total[largest] += residual[largest]
            residual[largest] = 0.0
        w = [w[i] - rate(t) * total[i] / 2 for i in (0, 1)]
        path.append(math.hypot(*w))
    return path


def test_06_a_fixed_rate_ends_in_a_neighbourhood_and_a_shrinking_one_converges():
    text = printed("06_compression", "cell-26")
    long = 200_000
    for gamma in (0.01, 0.005):
        path = distances(lambda t, gamma=gamma: gamma, long)
        end = path[long // 2 :]
        assert gamma / 10 < min(end), "it arrived"
        assert max(end) < 10 * gamma
        least, largest, *_ = row(text, f"γ = {gamma}")
        late = path[2000:3000]
        assert [least, largest] == pytest.approx([min(late), max(late)], abs=2e-4)
    shrinking = distances(lambda t: 3 / (300 + t), long)
    assert max(shrinking[-1000:]) < 1e-3
    late = shrinking[2000:3000]
    shown = re.findall(r"distance (\S+) to (\S+) in", text)[-1]
    assert [float(each) for each in shown] == pytest.approx([min(late), max(late)], abs=2e-4)


@pytest.mark.parametrize("size", [2, 4, 8, 16, 64])
def test_06_top_k_pays_up_to_2_over_k_less_the_bitmap(size):
    """Compare with bits counted for every density in steps of 1/10,000."""

    def largest_density(bits: float, index: float) -> float:
        def sent(density: float) -> float:
            return (size - 1) * (density * bits + min(density * index, 1.0))  # per number

        ring = 2 * (size - 1) / size * bits
        return max(i / 1e4 for i in range(10_001) if sent(i / 1e4) < ring)

    text = printed("06_compression", "cell-39-table")
    counted, formula, half = row(text.replace("in float16", ""), f"K = {size:2}:")
    assert counted == pytest.approx(100 * largest_density(32, 32), abs=0.1)
    assert formula == pytest.approx(counted, abs=0.1)
    assert half == pytest.approx(100 * largest_density(16, math.log2(25.6e6)), abs=0.1)


def test_07_all_columns_are_those_of_the_same_1_5_seconds():
    """Workers take 10, 11, 12 and 40 ms: steps end with the slowest, or with the third."""
    text = printed("07_asynchronous_training", "cell-23")
    expected = {"synchronous": 4 / 0.040, "3 of 4": 3 / 0.012, "bound 2": 4 / 0.040}
    expected["asynchronous"] = expected["staleness-aware"] = sum(
        1 / t for t in (0.010, 0.011, 0.012, 0.040)
    )
    for mode, pace in expected.items():
        gradients, staleness, largest, dropped, *losses = row(text, mode)
        assert gradients == pytest.approx(pace, rel=0.06)
        assert len(losses) == 4
        late = 1.5 / 0.040  # gradients of the straggler
        assert dropped == (math.floor(late) if mode == "3 of 4" else 0)
        if mode in ("synchronous", "3 of 4"):
            assert staleness == largest == 0


def test_07_tuned_alike_the_synchronous_run_is_as_good_as_diloco():
    text = printed("07_asynchronous_training", "cell-37")
    kilobytes, best, half = {}, {}, {}
    for method in ("synchronous", "DiLoCo, H = 10", "DiLoCo, H = 50"):
        kilobytes[method], _, *losses, best[method], half[method] = row(text, method)
        assert len(losses) == 4, "as many learning rates for each"
        assert best[method] == min(losses)
        assert losses.index(min(losses)) in (1, 2), "the best is not at the end of the grid"
    weights = 64 * 32 + 32 + 32 * 10 + 10
    ring = 2 * 3 / 4 * 4 * weights / 1e3
    assert kilobytes["synchronous"] == pytest.approx(200 * ring, abs=1)
    assert kilobytes["DiLoCo, H = 50"] == pytest.approx(4 * ring, abs=1)
    apart = best["synchronous"] - best["DiLoCo, H = 10"]
    assert apart < half["synchronous"] + half["DiLoCo, H = 10"]
    apart = best["DiLoCo, H = 50"] - best["synchronous"]
    assert apart > half["synchronous"] + half["DiLoCo, H = 50"]


@pytest.mark.parametrize(("shards", "replicas"), [(1, 8), (4, 2), (8, 1)])
def test_09_hybrid_sharding_sends_less_across(shards, replicas):
    """ZeRO-3 over the shards, an all-reduce over the replicas; Adam in fp32 holds 16 bytes."""
    sharding = 3 * (shards - 1) / shards
    averaging = 2 / shards * (replicas - 1) / replicas
    across = averaging if replicas > 1 else sharding
    held, sent, crossing, formula, _ = row(
        printed("09_sharding_the_model", "cell-hsdp-run"), f" {shards} "
    )
    assert held == pytest.approx(16 / shards, abs=0.05)
    assert sent == pytest.approx(sharding + averaging, abs=0.006)
    assert crossing == formula == pytest.approx(across, abs=6e-4)


def test_09_pytorchs_hybrid_sharding_sends_as_much():
    text = printed("09_sharding_the_model", "cell-hsdp-fsdp2-run")
    inside, across = re.findall(r"([\d.]+) Ψ", text)
    assert (float(inside), float(across)) == (3 * 3 / 4, 2 / 4 * 1 / 2)


def test_09_an_all_reduce_in_two_levels_crosses_with_as_much():
    """Reduce-scatter and all-gather of 4 ranks inside, an all-reduce of a quarter over 2 nodes."""
    text = printed("09_sharding_the_model", "cell-hsdp-two-levels-run")
    sent, across, _ = row(text, "DDP in two levels sends")
    assert across == 2 / 4 * 1 / 2
    assert sent == 2 * 3 / 4 + across


def test_09_rows_of_the_running_model():
    """Sent 2Ψ(K-1)/K, with ZeRO-3 3Ψ; fp32 state 16, 10, 7 and 4 bytes on four ranks."""
    text = printed("09_sharding_the_model", "running-model-run")
    psi = sum(param.numel() for param in transformer(SHAPE).parameters()) / 1e3
    kept = {"data parallel": 16, "overlap": 16, "ZeRO-1": 10, "ZeRO-2": 7, "ZeRO-3": 4}
    saved = row(text, "data parallel")[4]
    loss = row(text, "one rank")[-1]
    for way, nbytes in kept.items():
        _, _, sent, *state_saved_loss = row(text, way)
        assert state_saved_loss == [pytest.approx(nbytes * psi, abs=0.5), saved, loss]
        times = 3 if way == "ZeRO-3" else 2
        assert sent == pytest.approx(times * 3 / 4 * 4 * psi, rel=0.01)


def test_09_how_many_gpus_hold_70_billion():
    text = printed("09_sharding_the_model", "estimates-gpus-run")
    assert re.findall(r"least number +(\w+)", text) == ["none"] * 3 + [str(math.ceil(16 * 70 / 64))]
    for name, floor in (("DDP", 1120), ("ZeRO-1", 280), ("ZeRO-2", 140), ("ZeRO-3", 0)):
        (line,) = (line for line in text.splitlines() if f" {name} " in line)
        each = floor + (1120 - floor) / 64
        assert float(re.findall(r"([\d.]+) GB", line)[0]) == pytest.approx(each, abs=0.06)


def test_10_six_weights_on_two_ranks_are_those_of_autograd():
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    a = torch.tensor([[2.0, -1.0], [1.0, 3.0]], requires_grad=True)
    b = torch.tensor([3.0, -2.0], requires_grad=True)
    z = torch.relu(x @ a) @ b
    (0.5 * (z + 1) ** 2).backward()
    text = printed("10_tensor_parallelism", "cell-small-run")

    def of_ranks(name: str) -> list[list[float]]:
        (line,) = (line for line in text.splitlines() if line.startswith(f"{name} "))
        pair = line.split("rank 0:")[1].split("rank 1:")
        return [[float(n) for n in re.findall(r"-?\d+\.\d", each)] for each in pair]

    assert of_ranks("dA") == a.grad.T.tolist()
    assert [number for (number,) in of_ranks("dB")] == b.grad.tolist()
    assert of_ranks("dx") == [x.grad.tolist()] * 2
    assert of_ranks("z") == [[z.item()]] * 2
    assert [sum(n) for n in zip(*of_ranks("term of dx"), strict=True)] == x.grad.tolist()


def test_11_one_more_step_of_h2_has_no_bubble():
    """A rank of 4 works for 8 (F + B) = 24 units in a step; H1 and H2 take 27 for one alone."""
    text = printed("11_n_dimensional_parallelism", "cell-20")
    alone, more = 1 - 24 / 27, 1 - 24 / 24
    *columns, _, _ = row(text, "zero bubble H1")
    assert columns == pytest.approx([alone] * 5, abs=1e-3)
    *columns, held, _ = row(text, "zero bubble H2")
    assert columns == pytest.approx([alone, alone, more, more], abs=1e-3)
    assert held == 2 * 4 - 1


def test_11_ring_attention_sends_what_travels():
    """Keys and values go round once in each direction; their gradients come home besides."""
    k = 4
    text = printed("11_n_dimensional_parallelism", "cell-context-bytes")
    assert row(text, "backward False: sends") == [2 * (k - 1)] * 2
    assert row(text, "backward True : sends") == [2 * 2 * (k - 1) + 2 * k] * 2


def test_11_squares_of_a_causal_mask_are_those_counted_on_a_grid():
    """A square of pieces is computed unless all of its keys come after all of its queries."""
    k = 4
    holders = {
        "contiguous": [[2 * r, 2 * r + 1] for r in range(k)],
        "zigzag": [[r, 2 * k - 1 - r] for r in range(k)],
    }
    text = printed("11_n_dimensional_parallelism", "cell-context-squares")
    seen = {"contiguous": lambda q, c: c // 2 <= q // 2, "zigzag": lambda q, c: c <= q}
    for name, held in holders.items():
        counts = [sum(seen[name](q, c) for q in mine for c in range(2 * k)) for mine in held]
        assert row(text.replace("ranks 0 to 3", ""), name) == counts


def test_11_layouts_of_gpt_3_fit_and_add_up():
    """Fastest first, none above the memory, each row adds up; texts in flight as schedules say."""
    text = printed("11_n_dimensional_parallelism", "cell-search-table")
    rows = [[float(n) for n in line.split()] for line in text.splitlines()[1:]]
    totals = [each[-1] for each in rows]
    assert totals == sorted(totals), "the fastest first; the row for comparison is slower"
    for tensor, pipeline, data, v, held, *parts, total in rows:
        assert tensor * pipeline * data == 512
        p, v, weights = int(pipeline), int(v), 12 * 12288**2 * 96 + 51200 * 12288
        plan = interleaved(p, 2 * p, v) if v > 1 else one_forward_one_backward(p, 2 * p)
        layers = peak_activations(plan)[0] * 96 / (p * v)  # of all texts in flight on rank 0
        activations = 34 * 2048 * 12288 / tensor * layers
        assert held == pytest.approx((16 * weights / (tensor * p) + activations) / 1e9, abs=0.5)
        assert held <= 72.5
        assert sum(parts) == pytest.approx(total, abs=0.03)


def test_11_numbers_that_do_not_multiply():
    text = printed("11_n_dimensional_parallelism", "cell-multiply-run")
    first, third = text.splitlines()
    assert first.endswith(f"= {math.prod((8, 16, 16, 4)):6,}, 50% of 16,384")
    assert third.endswith(f"= {math.prod((8, 16, 16, 8)):6,}, 100% of 16,384")
