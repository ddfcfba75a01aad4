"""The numbers on which lecture 08 rests, from the page's own cells."""

from collections.abc import Callable
from typing import Any

import matplotlib
import nbformat
import pytest

from tests.helpers.course_folders import ROOT

PAGE = ROOT / "lectures" / "08_decentralized_training.ipynb"
IMPORTS = ("01", "02", "02b")
TRAINING = (*IMPORTS, "04", "08", "17", "24", "30", "31", "37", "45")


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
    found = page(*TRAINING, "46", "47", "47a")
    for place, alpha, wire in (
        ("20 ms, 1 GB/s", 20e-3, 9664e-9),
        ("20 ms, 1 MB/s", 20e-3, 9664e-6),
    ):
        expected = {
            "ring all-reduce": 2e-3 + 14 * (alpha + wire / 8),
            "direct all-reduce": 2e-3 + 2 * alpha + 1.75 * wire,
            "one-shot all-reduce": 2e-3 + alpha + 7 * wire,
            "gossip, exponential": alpha + 3 * wire,
            "gossip, ring": alpha + 2 * wire,
            "gossip, pairs": alpha + wire,
        }
        paces = {name: found["pace"][place, name] for name in found["RACERS"]}
        assert paces == pytest.approx(expected)


def accuracies(found: dict[str, Any]) -> Callable[[float, str, str, bool], float]:
    """Return a function: seconds, place, racer, whether data are sorted → mean accuracy then."""
    ranks = found["Ranks"](8, on="simulated")

    def after(seconds: float, place: str, name: str, is_sorted: bool) -> float:
        steps = int(seconds / found["pace"][place, name])
        how = {"lr": 0.3, "is_sorted": is_sorted, "steps": steps, "every": steps}
        if name in found["GRAPHS"]:
            run = ranks.run(found["train"], found["GRAPHS"][name], **how)
        else:
            run = ranks.run(found["synchronous"], **how)
        return mean_accuracy(run)

    return after


@pytest.mark.large
def test_who_is_ahead_when(page: Any) -> None:
    """20 ms: with sorted data direct is ahead of gossip after 1.2 s; with fair data behind."""
    after = accuracies(page(*TRAINING, "46", "47", "47a"))
    near, far = "20 ms, 1 GB/s", "20 ms, 1 MB/s"
    early = after(1.2, near, "gossip, exponential", True)
    assert after(1.2, near, "ring all-reduce", True) < early  # gossip beats the ring …
    assert early < after(1.2, near, "direct all-reduce", True)  # … and direct beats gossip
    assert after(4, near, "gossip, exponential", True) > early + 0.1  # 1.2 s was not the end
    pairs = after(2.4, far, "gossip, pairs", False)
    assert pairs > after(2.4, far, "direct all-reduce", False) + 0.05


@pytest.mark.large
def test_who_is_ahead_after_14_seconds(page: Any) -> None:
    after = accuracies(page(*TRAINING, "46", "47", "47a"))
    place = "20 ms, 1 GB/s"
    ring = after(14, place, "ring all-reduce", True)
    gossip = [after(14, place, f"gossip, {graph}", True) for graph in ("ring", "exponential")]
    assert ring < gossip[0] < gossip[1] < after(14, place, "one-shot all-reduce", True)
    assert gossip == pytest.approx([0.91, 0.95], abs=0.015)  # as the text says
