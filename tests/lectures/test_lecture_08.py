"""The numbers on which lecture 08 rests, from the page's own cells."""

import itertools
from typing import Any

import matplotlib
import nbformat
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.helpers.course_folders import ROOT
from tests.lectures.test_printed_numbers import printed, row

PAGE = ROOT / "lectures" / "08_decentralized_training.ipynb"
IMPORTS = ("01", "02", "02b")
LECTURE = "08_decentralized_training"
TRAINING = (*IMPORTS, "04", "08", "08b", "17", "24", "30", "31", "37")
RACE = (*TRAINING, "42", "42b", "45", "45b", "45c", "46")


@pytest.fixture
def page() -> Any:
    """Return a function that executes cells of the page, and returns what they defined."""
    matplotlib.use("Agg")
    cells = {cell.id: cell.source for cell in nbformat.read(PAGE, as_version=4).cells}

    def execute(*names: str) -> dict[str, Any]:
        found: dict[str, Any] = {"__name__": "page"}
        for name in names:
            exec(compile(cells[f"cell-{name}"], f"cell-{name}", "exec"), found)
        return found

    with matplotlib.rc_context():
        yield execute


def mean_accuracy(run: list[list[tuple[float, float]]]) -> float:
    """Return the mean over the ranks after the last step; each rank looked once."""
    return sum(last[1] for (last,) in run) / len(run)


def milliseconds(found: dict[str, Any], k: int, numbers: int) -> dict[str, float]:
    ranks = found["Ranks"](k, on="simulated", network=found["network"])
    times = {}
    for name, way in found["MEANS"].items():
        times[name] = 1e3 * max(ranks.run(found["one_mean"], way, numbers))
    return times


def test_gossip_is_up_to_twice_as_fast_as_the_best_all_reduce_not_k_times(page: Any) -> None:
    """α = 1 ms, and 4,096 bytes on the wire for 4 µs: a latency is all that a message costs."""
    times = milliseconds(page(*IMPORTS, "04", "08"), 64, 1024)
    alpha, wire = 1.0, 4096e-6
    assert times["ring"] == pytest.approx(126 * (alpha + wire / 64))
    assert times["halving-doubling"] == pytest.approx(12 * alpha + 2 * 63 / 64 * wire)
    assert times["direct"] == pytest.approx(2 * alpha + 2 * 63 / 64 * wire)
    assert times["one-shot"] == pytest.approx(alpha + 63 * wire)
    gossip = times.pop("gossip")
    assert gossip == pytest.approx(alpha + 2 * wire)
    assert 1 < min(times.values()) / gossip < times["direct"] / gossip < 2


@pytest.mark.parametrize("k", [4, 8, 16])
@pytest.mark.parametrize("numbers", [16, 1 << 18])
def test_direct_never_takes_twice_as_long_as_hearing_one_tensor(page: Any, k: int, numbers: int):
    times = milliseconds(page(*IMPORTS, "04", "08"), k, numbers)
    assert times["direct"] < 2 * (1.0 + 4e-6 * numbers)


def test_with_an_overhead_the_best_all_reduce_is_six_times_as_far(page: Any) -> None:
    """K messages at once take α + o + K (o + n/β). α = 1 ms, o = 0.1 ms, n/β = 4 µs, 64 ranks."""
    found = page(*IMPORTS, "04", "08", "08b")
    found["network"] = found["Network"](1e-3, 1e9, eager_below=10**9, overhead=1e-4)
    formulas = {}
    for name, formula in found["FORMULAS"].items():
        formulas[name] = 1e3 * formula(4096, 64, found["network"])
    gossip = formulas.pop("gossip")
    assert gossip == pytest.approx(1.1 + 2 * 0.104096)
    assert min(formulas.values()) == pytest.approx(1.1 + 63 * 0.104096) == formulas["one-shot"]
    assert 5.5 < formulas["one-shot"] / gossip < 6
    assert max(formulas["direct"], formulas["halving-doubling"]) / gossip < 12
    for name, ms in milliseconds(found, 8, 1024).items():
        assert ms == pytest.approx(1e3 * found["FORMULAS"][name](4096, 8, found["network"]))


def test_the_map_charges_8_bits_the_latencies_that_the_exchange_has(page: Any) -> None:
    found = page(*IMPORTS, "04", "08", "08b", "42", "42b")
    network, charged, measured = found["Network"], [], []
    for latency in (1e-3, 3e-3):
        link = network(latency, 1e9, eager_below=10**9)
        ranks = found["Ranks"](8, on="simulated", network=link)
        measured.append(max(ranks.run(found["one_mean"], found["in_8_bits"], 1 << 18)))
        charged.append(found["step_times"](latency, 1e9, n=1 << 20)["8 bits, direct"])
    latencies = (measured[1] - measured[0]) / 2e-3
    assert latencies == pytest.approx(2)  # not the 14 of a ring
    assert (charged[1] - charged[0]) / 2e-3 == pytest.approx(latencies)
    assert measured == pytest.approx(charged, rel=0.01)  # it also sends a scale for each block


def test_the_border_of_the_map(page: Any) -> None:
    """2α + 1.75 n/4β = α + n/β where α = 0.5625 n/β: 14 ms for 25 MB and 1 GB/s."""
    times = page(*IMPORTS, "04", "08", "08b", "42", "42b")["step_times"]
    winners = [min(each, key=each.get) for each in (times(14.0e-3, 1e9), times(14.1e-3, 1e9))]
    assert winners == ["8 bits, direct", "gossip, pairs"]


@pytest.mark.large
def test_alone_a_rank_does_not_get_as_far(page: Any) -> None:
    """Fair data, four seeds: the mean over the ranks."""
    found = page(*TRAINING)
    ranks, k = found["Ranks"](8, on="simulated"), found["K"]
    apart = []
    for seed in range(4):
        together = ranks.run(found["train"], found["complete_mixing"](k), seed=seed)
        alone = ranks.run(found["train"], found["torch"].eye(k), seed=seed)
        apart.append(mean_accuracy(together) - mean_accuracy(alone))
    assert min(apart) > 0
    assert sum(apart) / 4 > 0.02


def test_the_seconds_of_a_step(page: Any) -> None:
    found = page(*RACE, "47", "47a")
    eight_bits = 2 * 7 * (9664 / 4 / 8 + 4)  # bytes of all chunks, each with its scale
    for place, alpha, beta in (("20 ms, 1 GB/s", 20e-3, 1e9), ("20 ms, 1 MB/s", 20e-3, 1e6)):
        wire = 9664 / beta
        expected = {
            "ring": 2e-3 + 14 * (alpha + wire / 8),
            "direct": 2e-3 + 2 * alpha + 1.75 * wire,
            "one-shot": 2e-3 + alpha + 7 * wire,
            "8 bits, direct": 2e-3 + 2 * alpha + eight_bits / beta,
            "gossip, exponential": alpha + 3 * wire,
            "gossip, ring": alpha + 2 * wire,
            "gossip, pairs": alpha + wire,
        }
        paces = {name: found["pace"][place, name] for name in found["WAYS"]}
        assert paces == pytest.approx(expected)


def test_gradients_of_all_models_at_once_are_those_of_autograd(page: Any) -> None:
    """One rate, seed and rank of the many, as a module of PyTorch."""
    found = page(*RACE)
    first, rank, draw = found["first_weights"](), 5, torch.Generator().manual_seed(1)
    rows = found["batch_rows"](True, draw)
    together = found["gradients"](first, rows)[2, 3, rank]
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
    batch = rows[3, rank]
    F.cross_entropy(model(found["images"][batch]), found["labels"][batch]).backward()
    begin, bias, last, end = (param.grad for param in model.parameters())
    alone = torch.cat([begin.T.flatten(), bias, last.T.flatten(), end])
    assert torch.allclose(together, alone, atol=1e-6)


@pytest.mark.parametrize("is_sorted", [False, True])
def test_each_rank_draws_from_its_own_eighth(page: Any, is_sorted: bool) -> None:
    found = page(*RACE)
    draw = torch.Generator().manual_seed(0)
    drawn = torch.cat([found["batch_rows"](is_sorted, draw) for _ in range(60)], dim=2)
    held = [set(drawn[:, rank].flatten().tolist()) for rank in range(8)]
    assert all(not a & b for a, b in itertools.combinations(held, 2))
    digits = [set(found["labels"][list(rows)].tolist()) for rows in held]
    assert all(len(seen) <= 3 if is_sorted else len(seen) == 10 for seen in digits)


def test_seconds_to_the_goal_are_steps_times_seconds_and_a_last_average() -> None:
    counts = printed(LECTURE, "cell-46b").replace("inf", "0")
    shown = printed(LECTURE, "cell-47b")
    for column, (data, beta) in enumerate(
        (data, beta) for data in ("sorted", "fair") for beta in (1e9, 1e6)
    ):
        wire, alpha = 9664 / beta, 20e-3
        average = min(2 * alpha + 1.75 * wire, alpha + 7 * wire)
        for way, once, end in (
            ("direct", 2e-3 + 2 * alpha + 1.75 * wire, 0.0),
            ("one-shot", 2e-3 + alpha + 7 * wire, 0.0),
            ("gossip, ring", alpha + 2 * wire, average),
            ("gossip, pairs", alpha + wire, average),
        ):
            source = way if "gossip" in way else "exact mean"
            steps = row(counts, f"{data:6} {source}")[4]
            said = row(shown, way)[2 * column]
            assert said == pytest.approx(steps * once + end, abs=0.011 + 0.05 * once)


@pytest.mark.large
def test_tuned_alike_gossip_needs_few_more_steps_with_fair_data_and_many_with_sorted(
    page: Any,
) -> None:
    """Two of the four rates, among which the page's best are."""
    found = page(*RACE)
    found["RATES"] = (0.4, 0.8)
    first = {}
    for is_sorted, most in ((True, 160), (False, 70)):
        for way, mixing in (("exact", None), ("pairs", found["GRAPHS"]["gossip, pairs"])):
            there = found["race"](mixing, is_sorted, most) >= 0.9
            reached = torch.where(there.any(0), there.float().argmax(0) + 1.0, float(most))
            first[is_sorted, way] = float(reached.mean(1).min())
    assert first[False, "pairs"] < 1.5 * first[False, "exact"]
    assert first[True, "pairs"] > 2.5 * first[True, "exact"]
