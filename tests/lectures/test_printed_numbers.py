"""Numbers that lectures print, and draw conclusions from, against mathematics or PyTorch."""

import math
import re

import nbformat
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from course_lib.cost_model import direct_all_reduce_time, ring_all_reduce_time
from course_lib.data import digits
from course_lib.ranks import Network
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
