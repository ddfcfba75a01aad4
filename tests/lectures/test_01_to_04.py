"""Numbers on the pages of lectures 01, 02 and 04, against mathematics or PyTorch."""

import inspect
import math
import pickle
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import nbformat
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn.parallel import DistributedDataParallel

from course_lib.data import digits
from course_lib.mesh import transformer
from course_lib.running_model import SHAPE
from tests.helpers import ROOT
from tests.lectures.test_printed_numbers import printed, row

SCRIPTS = ROOT / "lectures" / "scripts"
RANKS = 4


# --- lecture 01 ---------------------------------------------------------------------------------


def test_01_the_noise_scale_before_the_first_step():
    """Once more, from one gradient per row, which autograd gives for a whole batch."""
    images, labels = digits()[0].tensors
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    params = {name: param.detach() for name, param in model.named_parameters()}

    def loss(params, x, y):
        return F.cross_entropy(functional_call(model, params, (x[None],)), y[None])

    each = vmap(grad(loss), in_dims=(None, 0, 0))(params, images, labels)
    rows = torch.cat([part.flatten(1) for part in each.values()], dim=1).double()
    mean = rows.mean(0)
    exact = (rows - mean).square().sum(1).mean() / mean.square().sum()
    first = printed("01_minibatch_sgd", "critical-training").splitlines()[0]
    *_, estimated, shown = (float(each) for each in re.findall(r"\d+(?:\.\d+)?", first))
    assert shown == pytest.approx(float(exact), abs=0.51)
    assert estimated == pytest.approx(shown, rel=0.3), "200 draws of each size"


def test_01_the_steps_lie_on_a_hyperbola():
    text = printed("01_minibatch_sgd", "critical-table")
    lines = [re.findall(r"\d+(?:\.\d+)?", line) for line in text.splitlines()]
    sizes, rates, steps, _, rows = np.array(lines, dtype=float).T
    assert rows == pytest.approx(sizes * steps, rel=2e-3)
    assert all(rates > 0.1), "the best rate is not at the end of the grid"
    assert all(rates < 1.6), "the best rate is not at the end of the grid"
    terms = np.stack([1 / steps, 1 / (sizes * steps)], axis=1)
    least, cost = np.linalg.solve(terms.T @ terms, terms.T @ np.ones(len(steps)))
    fit = printed("01_minibatch_sgd", "critical-fit")
    shown = [float(each) for each in re.findall(r"\d+(?:\.\d+)?", fit.splitlines()[0])]
    assert shown == pytest.approx([least, cost, cost / least], rel=0.01, abs=0.6)
    assert least + cost / sizes == pytest.approx(steps, rel=0.08)


def test_01_estimated_tokens_and_steps_lie_on_the_hyperbola():
    text = printed("01_minibatch_sgd", "estimate-tokens")
    for line, loss in zip(text.splitlines(), (3.0, 2.5, 2.0), strict=True):
        critical = math.exp(math.log(2e8) - math.log(loss) / 0.21)
        assert f"critical {critical / 1e6:.1f} M" in line
        pairs = re.findall(r"B = (\d+) M: tokens x ([\d.]+), steps x ([\d.]+)", line)
        assert [int(batch) for batch, _, _ in pairs] == [4, 16]
        for batch, tokens, steps in pairs:
            assert float(tokens) == pytest.approx(1 + 1e6 * int(batch) / critical, abs=0.06)
            # (S/S_min - 1) (E/E_min - 1) = 1, up to the digits shown
            assert (float(tokens) - 1) * (float(steps) - 1) == pytest.approx(1, rel=0.1)


def test_01_an_h100_has_enough_tokens():
    text = printed("01_minibatch_sgd", "estimate-roofline")
    share, corner, most = (int(each.replace(",", "")) for each in re.findall(r"[\d,]+\d", text))
    assert share == round(16e6 / 16384)
    assert corner == round(989 / 3.35)
    assert most == pytest.approx(share * 16384 / corner, rel=0.01)


# --- lecture 02 ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def network():
    images, labels = digits()[0].tensors
    torch.manual_seed(0)
    hidden = [nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh()]
    model = nn.Sequential(*hidden, nn.Linear(512, 10))

    def gradient(rows):
        loss = F.cross_entropy(model(images[rows]), labels[rows])
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, model.parameters())])

    return gradient


def test_02_only_a_linear_step_may_be_averaged_before_or_after(network):
    """Adam's first step is -lr g / (|g| + eps): its mean over ranks, beside that of the mean."""
    own = torch.stack([network(slice(a, a + 16)) for a in range(64, 128, 16)])

    def adam(gradient):
        return gradient / (gradient.abs() + 1e-8)

    of_the_mean = adam(own.mean(0))
    apart = (adam(own).mean(0) - of_the_mean).norm() / of_the_mean.norm()
    text = printed("02_data_parallel_sgd", "weights-compare")
    distances = {
        line[:18].strip(): [float(each) for each in re.findall(r"\d+e[-+]\d+", line)]
        for line in text.splitlines()[1:]
    }
    assert distances["Adam"][0] == pytest.approx(float(apart), abs=0.06)
    for name in ("SGD", "SGD, momentum 0.9"):
        assert max(distances[name][:2]) < 1e-4, "rounding"
        assert distances[name][2] > 1e-2, "every fifth step is another algorithm"


def products(rows):
    """Return the operations of the matrix products of forward and backward."""
    first, rest = 64 * 512, 512 * 512 + 512 * 10
    return 2 * rows * (2 * first + 3 * rest)  # the images need no gradient


def test_02_measured_speed_ups_are_those_of_the_formulas():
    serial, flops, parameters = 1e-3, 100e9, 65 * 512 + 513 * 512 + 513 * 10
    seconds = products(1024) / flops
    share = serial / (serial + seconds)

    def ring(k):
        return 2 * (k - 1) * (20e-6 + 4 * parameters / k / 1e9)

    text = printed("02_data_parallel_sgd", "scaling-run")
    ranks = row(text, "K:")
    assert ranks == [1, 2, 4, 8, 16]
    alone = serial + seconds
    amdahl = [1 / (share + (1 - share) / k) for k in ranks]
    strong = [alone / (serial + seconds / k + ring(k)) for k in ranks]
    weak = [(serial + k * seconds) / (alone + ring(k)) for k in ranks]
    assert row(text, "free messages") == pytest.approx(amdahl, abs=6e-3)
    assert row(text, "same batch") == pytest.approx(strong, abs=0.02)
    assert row(text, "K x batch") == pytest.approx(weak, abs=0.02)


def test_02_unequal_shards_need_weights(network):
    sizes = [307, 307, 307, 103]
    ends = [sum(sizes[:k]) for k in range(RANKS + 1)]
    shards = [network(slice(a, b)) for a, b in pairwise(ends)]
    exact = network(slice(0, 1024))
    off = float((sum(shards) / RANKS - exact).norm() / exact.norm())
    text = printed("02_data_parallel_sgd", "unequal-run").splitlines()[1:]
    times, errors = zip(*(map(float, line.split()[-2:]) for line in text), strict=True)
    assert errors[1] == pytest.approx(off, rel=0.04)
    assert max(errors[0], errors[2]) < 1e-6
    slow, proportional = (3 * products(rows) / 100e9 for rows in (256, 103))
    for measured, computed in zip(times, (slow, proportional, proportional), strict=True):
        assert computed < measured / 1e3 < computed + 2e-3, "and an all-reduce"


def test_02_the_running_model_in_two_ways():
    """Bytes of a ring, 16 bytes of state for each parameter, and the same loss."""
    parameters = sum(param.numel() for param in transformer(SHAPE).parameters())
    text = printed("02_data_parallel_sgd", "running-table")
    ranks, alone, nothing, state, saved, loss = row(text, "one rank")
    team, together, sent, *rest = row(text, "data parallel")
    assert [ranks, nothing, team] == [1, 0, RANKS]
    assert sent == round(2 * (RANKS - 1) / RANKS * 4 * parameters / 1e3)
    assert rest[0] == state == round(16 * parameters / 1e3)
    assert rest[1] == pytest.approx(saved / RANKS, rel=0.01)
    assert rest[2] == pytest.approx(loss, abs=1e-4)
    ring = 2e3 * (RANKS - 1) * (20e-6 + 4 * parameters / RANKS / 10e6)
    assert alone / RANKS + ring < together < alone / RANKS + ring + 5, "and the optimizer's step"
    assert together == pytest.approx(alone / 2, rel=0.02), "it halves"


def test_02_estimates_of_bandwidth_and_of_a_straggler():
    text = printed("02_data_parallel_sgd", "estimate-bandwidth")
    for line, ranks in zip(text.splitlines(), (512, 4096), strict=True):
        shown = re.findall(r"(\d+\.\d) s", line)
        computing = 6 * 70 * 4e6 / ranks / 400e3
        sending = 2 * 140 / 50 * (1 - 1 / ranks)
        assert [float(each) for each in shown] == pytest.approx([computing, sending], abs=0.06)
        assert (computing > sending) == (ranks == 512)
    worth = re.findall(r"\d+\.\d", printed("02_data_parallel_sgd", "estimate-straggler"))
    equal, without, share = (float(each) for each in worth)
    assert 512 - equal == pytest.approx(46.5, abs=0.06), "the 47 of the text"
    assert without < share < 512


# --- lecture 04 ---------------------------------------------------------------------------------


def test_04_youngs_interval_and_the_share_that_trains():
    text = printed("04_pytorch_ddp", "failures-fleet")
    between = 54 * 24 * 60 / 419  # minutes, of all GPUs together
    best = math.sqrt(2 * 1.0 * between)
    assert f"all: every {between:.0f} min" in text
    assert f"every {best:.1f} min (Young)" in text
    # To first order: saving, computing again, and ten minutes for each restart.
    lost = 1 / best + (best / 2 + 10) / between
    share = float(re.findall(r"1 of the best interval: ([\d.]+)%", text)[-1])
    assert share == pytest.approx(100 * (1 - lost), abs=1.5)


def test_04_the_estimated_intervals_lose_least():
    text = printed("04_pytorch_ddp", "estimate-saving")
    for line, speed in zip(text.splitlines(), (10e9, 640e9), strict=True):
        minutes, lost = (
            float(each) for each in re.findall(r"every +([\d.]+) min, lost ([\d.]+)", line)[0]
        )
        every = np.linspace(60, 3600, 100_000)
        losses = 1e12 / speed / every + every / 2 / 10800
        assert minutes == pytest.approx(every[losses.argmin()] / 60, abs=0.1)
        assert lost == pytest.approx(100 * losses.min(), abs=0.06)


def test_04_the_estimated_memory_of_a_parameter():
    """Weight, gradient and AdamW's two moments; once more the gradient in DDP's buckets."""
    param = nn.Parameter(torch.ones(100))
    param.grad = torch.ones(100)
    optimizer = torch.optim.AdamW([param])
    optimizer.step()
    moments = [each for each in optimizer.state[param].values() if each.numel() == 100]
    held = sum(each.nbytes for each in (param, param.grad, *moments)) // 100
    text = printed("04_pytorch_ddp", "estimate-memory")
    assert row(text, "gradient_as_bucket_view")[:2] == [held, 80 / held]
    assert row(text, "default")[:2] == [held + 4, 80 / (held + 4)]


def test_04_the_table_has_every_argument_of_ddp():
    text = printed("04_pytorch_ddp", "arguments-table")
    names = [line.split()[0] for line in text.splitlines()]
    assert sorted(names) == sorted(inspect.signature(DistributedDataParallel).parameters)


def cells_of_traces():
    nb = nbformat.read(ROOT / "lectures" / "04_pytorch_ddp.ipynb", as_version=4)
    return {cell.id: cell for cell in nb.cells if cell.id.startswith("traces-")}


def test_04_one_answer_holds_for_each_trace():
    cells = cells_of_traces()
    shown = [cells[f"traces-{name}-answer"].outputs[0].data["text/plain"] for name in "abcdef"]
    assert [text.count("\N{CHECK MARK}") for text in shown] == [1] * 6


def test_04_a_right_step_takes_as_long_as_the_page_says():
    cells = cells_of_traces()
    assert "latency=50e-6, bandwidth=600e6" in cells["traces-world"].source
    ring = 1e3 * 2 * (3 - 1) * (50e-6 + 2 * 256 * 256 * 4 / 3 / 600e6)
    computed = 8 * 0.5 + 7 * 1 + 0.5  # forward, backward, and the first layer's
    text = " ".join(cells["traces-0"].source.split())
    said = re.findall(r"of a bucket takes ([\d.]+) ms.*the last one ends at ([\d.]+) ms", text)
    assert [float(each) for each in said[0]] == pytest.approx([ring, computed + ring], abs=0.05)


def run_script(*command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=300, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.large
def test_04_the_tutorials_script_keeps_the_replicas_equal():
    lines = sorted(run_script(str(SCRIPTS / "spawn_ddp.py")).splitlines())
    assert len(lines) % 3 == 0, "three epochs"
    for epoch in "123":
        of_epoch = [line for line in lines if line.startswith(f"epoch {epoch}")]
        assert len({line.partition("|w|")[2] for line in of_epoch}) == 1
        assert len({line.partition(": ")[2] for line in of_epoch}) == len(of_epoch), "own rows"


@pytest.mark.large
def test_04_the_flight_recorders_show_the_collective_that_was_skipped(tmp_path: Path):
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    run_script(*launch, str(SCRIPTS / "hang.py"), str(tmp_path))
    entered = [
        [
            (entry["collective_seq_id"], entry["profiling_name"])
            for entry in pickle.loads((tmp_path / f"rank_{rank}").read_bytes())["entries"]
        ]
        for rank in (0, 1)
    ]
    both = [(1, "gloo:all_reduce"), (2, "gloo:all_reduce")]
    assert entered == [[*both, (3, "gloo:all_reduce")], [*both, (3, "gloo:barrier")]]
