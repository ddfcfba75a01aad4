"""Numbers that lectures print, and draw conclusions from, against mathematics or PyTorch."""

import itertools
import math
import re

import nbformat
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from course_lib.cost_model import direct_all_reduce_time, ring_all_reduce_time
from course_lib.data import digits
from course_lib.mesh import transformer
from course_lib.pipeline_parallel import (
    interleaved,
    one_forward_one_backward,
    peak_activations,
)
from course_lib.ranks import Network
from course_lib.running_model import SHAPE
from course_lib.who_wins.problem import Problem, batches, loss_of, new_model
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
        least, largest, *_ = row(text, f"η = {gamma}")
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


def test_06_one_rounding_ends_a_third_too_small() -> None:
    """Numbers uniform in [-1, 1]: E a² = 1/3, Var Q(a) = 1/6; so w (1/3 + 1/6) = 1/3."""
    text = printed("06_compression", "cell-64d")
    _, one = row(text, "one rounding")
    off, two = row(text, "two roundings")
    assert one == pytest.approx((1 / 3) / (1 / 3 + 1 / 6), abs=0.02)
    assert two == pytest.approx(1, abs=0.01)
    assert off < 1


@pytest.mark.parametrize("steps", [1, 2, 3, 4])
def test_06_no_other_levels_are_better(steps: int) -> None:
    """Compare with all choices of levels among nine numbers."""
    nb = nbformat.read(ROOT / "lectures" / "06_compression.ipynb", as_version=4)
    (source,) = (cell.source for cell in nb.cells if cell.id == "cell-64f")
    page: dict = {}
    exec(source, page)
    x = torch.randn(9, generator=torch.Generator().manual_seed(steps)).sort().values

    def total(levels: list[float]) -> float:
        pairs = itertools.pairwise(levels)
        return sum(float(((h - x) * (x - low)).clamp(min=0).sum()) for low, h in pairs)

    inner = itertools.combinations(x[1:-1], steps - 1)
    expected = min(total([x[0], *chosen, x[-1]]) for chosen in inner)
    least, levels = page["best_levels"](x, steps)
    assert least == pytest.approx(expected, rel=1e-5)
    assert total(levels) == pytest.approx(expected, rel=1e-5)
    assert len(levels) == steps + 1


def test_07_backup_workers_have_the_pace_of_the_asynchronous_server() -> None:
    """Compare with 20,000 steps drawn at random."""
    text = printed("07_asynchronous_training", "cell-42b")
    draws = torch.rand(20_000, 100, generator=torch.Generator().manual_seed(0))
    seconds = torch.where(draws < 0.01, 10.0, 1.0).sort(dim=1).values
    for count in (100, 96):
        (pace,) = row(text, f"derived: wait for {count}, ")
        assert pace == pytest.approx(count / float(seconds[:, count - 1].mean()), rel=0.04)
    (pace,) = row(text, "derived: wait for nobody, ")
    assert pace == pytest.approx(100 / float(seconds.mean()), rel=0.02)


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
        assert len(losses) == 5
        assert losses.index(min(losses)) in (1, 2, 3), "the best is not at the end of the grid"
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


WHO_WINS = "12_who_wins"
PLACES_12 = {
    f"{latency}, {bandwidth}": (alpha, beta)
    for latency, alpha in (("20 µs", 20e-6), ("5 ms", 5e-3), ("20 ms", 20e-3))
    for bandwidth, beta in (("30 kB/s", 30e3), ("1 MB/s", 1e6), ("10 MB/s", 10e6))
}


def test_12_exact_sums_take_the_steps_of_one_process_with_all_rows():
    """Synchronous training is that of one process with the batch of all ranks."""
    text = printed(WHO_WINS, "cell-03c")
    *_, a, b, c, d, e = row(text, "direct")
    lr = row(printed(WHO_WINS, "cell-02g"), "direct     AdamW     learning rate")[0]
    problem, found = Problem(), []
    for seed in range(5):
        model = new_model(seed)
        optimizer = torch.optim.AdamW(model.parameters(), lr)
        ranks = [batches(problem, seed, rank) for rank in range(4)]
        for step in range(1, problem.steps + 1):  # noqa: B007
            images, labels = (torch.cat(each) for each in zip(*map(next, ranks), strict=True))
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
            if loss_of([param.detach() for param in model.parameters()]) <= problem.target:
                break
        found.append(step)
    assert found == [a, b, c, d, e]


def test_12_the_formulas_on_the_page_are_those_of_the_cost_model():
    computed = re.findall(r"([\w -]+?) ([\d.]+) ms", printed(WHO_WINS, "cell-05"))
    compute = {name.strip(): float(ms) for name, ms in computed}
    text = printed(WHO_WINS, "cell-06c").split("s to the target")[0]
    n = sum(4 * param.numel() for param in new_model(0).parameters())
    for name, (alpha, beta) in PLACES_12.items():
        direct, one_bit, gossip, local, ring = row(text, name)
        network = Network(alpha, beta)
        once = 1e3 * direct_all_reduce_time(n, 4, network)
        bits = 1e3 * direct_all_reduce_time(n / 32, 4, network)
        around = 1e3 * ring_all_reduce_time(n, 4, network)
        both = 1e3 * (alpha + 2 * n / beta)
        assert direct == pytest.approx(compute["direct"] + once, abs=0.2)
        assert ring == pytest.approx(compute["ring"] + around, abs=0.2)
        assert one_bit == pytest.approx(compute["1-bit"] + bits, abs=0.2)
        assert local == pytest.approx(compute["local SGD"] + once / 8, abs=0.2)
        hidden = max(0, both - compute["alone"])
        assert gossip == pytest.approx(compute["gossip"] + hidden, abs=0.2)


def test_12_executed_all_reduces_take_what_the_product_says():
    derived = printed(WHO_WINS, "cell-06c").split("s to the target")[1]
    executed = printed(WHO_WINS, "cell-09b")
    for name in PLACES_12:
        *formula, ring, ring_half = row(derived, name)
        *found, found_ring, _ = row(executed, name)
        assert found[0] == pytest.approx(formula[0], rel=0.02, abs=0.011)  # direct
        assert found[4] == pytest.approx(formula[4], rel=0.03, abs=0.02)  # gossip
        assert found_ring == pytest.approx(ring, rel=0.02, abs=0.011)
        assert ring_half < ring


def test_12_tuned_alike_the_synchronous_run_is_ahead_of_diloco():
    text = printed(WHO_WINS, "cell-24c").split("\ndirect, SGD against")[0]
    seconds = {
        name: row(text, name)[2] for name in ("direct, SGD", "DiLoCo, AdamW", "direct, AdamW")
    }
    assert seconds["direct, AdamW"] < seconds["DiLoCo, AdamW"] < seconds["direct, SGD"]


def test_03_one_shot_or_direct_is_the_fastest_of_six():
    """α = 1 ms, β = 100 MB/s; up to three times as fast as the best of the others."""
    lines = re.findall(r"K = +(\d+), +([\d,]+) bytes (.*)", printed("03_collectives", "code-53c"))
    assert len(lines) == 9
    for k, size, rest in lines:
        *times, winner = rest.split()
        k, wire = int(k), int(size.replace(",", "")) / 100e3  # ms
        central, tree, ring, halving, direct, one_shot = map(float, times)
        assert one_shot == pytest.approx(1 + (k - 1) * wire, abs=0.006)
        assert direct == pytest.approx(2 + 2 * (k - 1) / k * wire, abs=0.006)
        assert ring == pytest.approx(2 * (k - 1) * (1 + wire / k), abs=0.006)
        fastest = min(one_shot, direct)
        assert winner == ("one_shot" if fastest == one_shot else "direct")
        assert 1.2 < min(central, tree, ring, halving) / fastest < 3


def test_03_without_a_switch_the_ring_is_the_fastest_and_central_gains():
    text = printed("03_collectives", "code-56b")
    ring = 2 * 11 * (1 + 1 / 100e3 * 100e3)  # ms: 100 kB a chunk, 1 ms of latency
    assert row(text, "ring ") == pytest.approx([ring, ring], abs=0.05)
    times = {name: row(text, name) for name in ("tree", "halving_doubling", "direct", "one_shot")}
    assert all(circle > switch and circle > 2 * ring for switch, circle in times.values())
    assert times["direct"][1] / times["direct"][0] == pytest.approx(5, abs=0.1)
    switch, circle = row(text, "central")
    assert 3 * ring < circle < switch


def test_03_estimates():
    """512 H100 of 989 TFLOP/s, 400 Gb/s and 10 µs between nodes, 450 GB/s and 5 µs inside."""
    step = 6 * 70e9 * 4e6 / 512 / (0.4 * 989e12)
    between, inside = 2 * 63 * (10e-6 + 140e9 / 512 / 50e9), 2 * 7 * (5e-6 + 140e9 / 8 / 450e9)
    expected = [step, 2 / 3 * step, 2 * 511 * (10e-6 + 140e9 / 512 / 50e9), between + inside]
    text = printed("03_collectives", "estimates-bandwidth")
    assert [float(each) for each in re.findall(r"([\d.]+) s\b", text)] == pytest.approx(
        expected, abs=0.05
    )
    text = printed("03_collectives", "estimates-latency")
    message = 10e-3 + 2 * 5e-3  # ms: α and o at both ends
    assert row(text, "derived: ring") == pytest.approx([2 * 511 * message], abs=0.006)
    for name in ("tree", "halving_doubling"):
        assert row(text, f"derived: {name}") == pytest.approx([2 * 9 * message], abs=0.006)


def last_sum(backward: float, count: int, call: float, wire: float) -> float:
    """Return when the last of `count` equal buckets has arrived, bucket by bucket."""
    free = 0.0
    for bucket in range(1, count + 1):
        free = max(free, backward * bucket / count) + call + wire / count
    return free


def test_05_best_sizes_of_a_bucket():
    """48 layers, 4 ranks: of all whole numbers of buckets, the one with the earliest last sum."""
    product = 2 * 64 * 128**2 / 7.5e9
    size = 48 * 4 * 128**2
    text = printed("05_bucketing_and_overlap", "cell-44")
    for label, latency, bandwidth in (
        ("  20 µs", 20e-6, 200e6),
        ("  80 µs", 80e-6, 200e6),
        ("  320 µs", 320e-6, 200e6),
        ("  50 MB/s", 80e-6, 50e6),
        ("  800 MB/s", 80e-6, 800e6),
    ):
        times = {
            m: last_sum(95 * product, m, 6 * latency, 1.5 * size / bandwidth) for m in range(1, 200)
        }
        best = size / min(times, key=times.get) / 1024
        assert row(text, label) == pytest.approx([best], abs=0.6)


def test_05_estimates():
    """7 billion parameters of 2 bytes, 64 H100 at 40 %, 8,192 tokens each, 400 Gb/s and 10 µs."""
    backward, call = 4 * 7e9 * 8192 / (0.4 * 989e12), 2 * 63 * 10e-6
    wire = 2 * 63 / 64 * 14e9 / 50e9
    text = printed("05_bucketing_and_overlap", "estimates-bucket")
    shown = re.findall(r"(\d+) buckets of .* MiB: ([\d.]+) s", text)
    counts = [int(count) for count, _ in shown]
    for count, seconds in shown:
        assert float(seconds) == pytest.approx(
            last_sum(backward, int(count), call, wire), abs=0.006
        )
    assert counts[1] == min(range(1, 600), key=lambda m: last_sum(backward, m, call, wire))
    assert float(shown[0][1]) > 1.9 * float(shown[1][1]), "25 MiB takes twice as long"
    text = printed("05_bucketing_and_overlap", "estimates-tokens")
    tokens = float(re.findall(r"ETHERNET_400 +([\d,]+)", text)[0].replace(",", ""))
    assert tokens == pytest.approx(8192 * wire / backward, abs=1)
