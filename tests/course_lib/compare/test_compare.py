"""The report, the tolerances and the layouts."""

from __future__ import annotations

import pickle

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib.compare import Record, blocks, compare, record, trusted_run
from course_lib.compare.layout import places_of, rows_of
from course_lib.ranks import Ranks
from tests.course_lib.compare.museum import batch, mine, mlp, one_rank, sgd, train

WORLD_SIZES = (1, 2, 3, 4)


def parts(whole: Tensor, world_size: int, dim: int) -> list[Tensor | None]:
    return list(whole.tensor_split(world_size, dim))


def assert_found(whole: Tensor, pieces: list[Tensor | None], **options: object) -> None:
    """Assert that `whole`, whose elements are all different, has the pieces where it is said."""
    places = places_of(whole, pieces, **options)  # type: ignore[arg-type]
    assert places is not None
    for piece, place in zip(pieces, places, strict=True):
        if piece is not None:
            assert place is not None
            assert torch.equal(whole.flatten()[place], piece)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("dim", [0, 1])
def test_slices_are_put_together(world_size: int, dim: int) -> None:
    whole = torch.randn(7, 5)
    assert_found(whole, parts(whole, world_size, dim))


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_flat_pieces_and_copies_are_put_together(world_size: int) -> None:
    whole = torch.randn(3, 5)
    assert_found(whole, parts(whole.flatten(), world_size, 0))
    assert_found(whole, [whole] * world_size)
    assert_found(whole, [whole] + [None] * (world_size - 1))
    assert_found(whole, 2 * parts(whole, world_size, 0))  # two groups of ranks, a whole in each


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_fused_blocks_are_put_together_by_a_rule(world_size: int) -> None:
    whole = torch.randn(24, 3)
    q, k, v = whole.chunk(3)
    pieces: list[Tensor | None] = [
        torch.cat([each.tensor_split(world_size)[rank] for each in (q, k, v)])
        for rank in range(world_size)
    ]
    assert_found(whole, pieces, cut=blocks(3))


def test_shapes_that_do_not_fit_are_not_guessed() -> None:
    whole = torch.randn(6, 4)
    assert places_of(whole, [whole[:2], whole[2:4]]) is None  # two rows are nowhere
    assert places_of(whole, [whole[:3, :2], whole[3:, 2:]]) is None
    assert places_of(whole, [torch.randn(5), torch.randn(5)]) is None


def test_rows_are_found_by_their_values() -> None:
    whole = torch.randn(6, 4)
    order = torch.tensor([4, 0, 2])
    strange = torch.cat([whole[:1], torch.zeros(1, 4)])
    for turn in (lambda x: x, Tensor.t):  # the batch may be in dimension 1
        found = rows_of([turn(whole)], [[turn(whole[order])], [turn(strange)], []])
        assert found is not None
        assert [each.tolist() for rank in found[1] for each in rank] == [[4, 0, 2], [0, -1]]
    one_wide = torch.randn(3, 4)[:, ::4]
    _, found_rows = rows_of([one_wide], [[one_wide[2:]], [one_wide[:2]]]) or (None, [])
    assert [each.tolist() for rank in found_rows for each in rank] == [[2], [0, 1]]


def test_a_record_can_be_sent_and_nothing_stays_behind() -> None:
    model = mlp()
    with record(model, optimizer := sgd(model)) as recorded:
        model(batch()[0]).sum().backward()
        optimizer.step()
    again = pickle.loads(pickle.dumps(recorded))
    assert again.tensors.keys() == recorded.tensors.keys()
    before = len(recorded.tensors)
    model(batch()[0]).sum().backward()
    optimizer.step()
    assert len(recorded.tensors) == before  # the hooks are gone


@pytest.mark.parametrize("error", [1e-7, 1e-3])
def test_the_tolerance_lies_between_rounding_and_an_error(error: float) -> None:
    def after(model: nn.Module) -> None:
        grad = model[3].weight.grad
        assert grad is not None
        grad[1, 2] += error * grad.abs().max()

    def step() -> Record:
        return train(mlp(), after=after)

    report = compare(trusted_run(one_rank), [step()])
    if error < 1e-5:
        assert report.first is None, report
    else:
        assert report.first is not None
        assert (report.first.key.kind, report.first.key.name) == ("gradient", "3.weight")
        assert report.first.part == "[1:2, 2:3]"


def test_wrong_uses_are_refused() -> None:
    trusted = trusted_run(one_rank)
    with pytest.raises(ValueError, match="lacks the disturbed runs"):
        compare(one_rank(), [one_rank()])
    lonely = one_rank()
    lonely.rank, lonely.world_size = 1, 2
    with pytest.raises(ValueError, match=r"records of the ranks \[1\]"):
        compare(trusted, [lonely])
    with pytest.raises(ValueError, match=r"trusted_run\(step, dtype=torch.bfloat16\)"):
        compare(trusted, [one_rank(dtype=torch.bfloat16)])
    model = mlp()
    with pytest.raises(ValueError, match="build the model inside the step"):
        trusted_run(lambda: one_rank(make=lambda: model))


def test_names_that_no_rank_has_are_listed() -> None:
    model = nn.ModuleDict({"other": mlp()})
    with record(model) as recorded:
        model["other"](batch()[0]).sum().backward()
    report = compare(trusted_run(one_rank), [recorded])
    assert len(report.left_out) == len(list(model.parameters()))
    assert "no rank has a weight of this name" in str(report)


@pytest.mark.parametrize("on", ["cpu", "simulated"])
def test_a_rule_of_the_user_for_names(on: str) -> None:
    def step(rank: int, world_size: int) -> Record:
        model = nn.ModuleDict({"inner": mlp()})
        with record(model, name=lambda name: name.removeprefix("inner.")) as recorded:
            x, y = mine(rank, world_size)
            nn.functional.mse_loss(model["inner"](x), y).backward()
            for param in model.parameters():
                dist.all_reduce(param.grad)
        return recorded

    def one() -> Record:
        model = mlp()
        with record(model) as recorded:
            x, y = batch()
            nn.functional.mse_loss(model(x), y).backward()
        return recorded

    with Ranks(2, on=on) as ranks:  # type: ignore[arg-type]
        records = ranks.run(lambda: step(dist.get_rank(), 2))
    report = compare(trusted_run(one), records)
    assert report.first is not None and report.first.label == "times K", report
