"""Numbers that lectures print, and draw conclusions from, against mathematics or PyTorch."""

import math
import re

import nbformat
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from course_lib.data import digits
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


def test_10_one_more_step_of_h2_has_no_bubble():
    """A rank of 4 works for 8 (F + B) = 24 units in a step; H1 and H2 take 27 for one alone."""
    text = printed("11_n_dimensional_parallelism", "cell-20")
    alone, more = 1 - 24 / 27, 1 - 24 / 24
    *columns, _, _ = row(text, "zero bubble H1")
    assert columns == pytest.approx([alone] * 5, abs=1e-3)
    *columns, held, _ = row(text, "zero bubble H2")
    assert columns == pytest.approx([alone, alone, more, more], abs=1e-3)
    assert held == 2 * 4 - 1


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
