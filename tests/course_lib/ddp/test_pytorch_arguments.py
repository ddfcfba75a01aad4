"""Scripts written for PyTorch's DDP: its names mean the same, or are refused with the reason."""

import inspect
import re

import pytest
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from course_lib.ddp import DistributedDataParallel
from course_lib.ddp.wrapper import ACCEPTED, REFUSED
from course_lib.ranks import RankError
from tests.helpers import ROOT
from tests.helpers.ddp_scenarios import FEW, compare, mlp, steps

# --- accepted -------------------------------------------------------------------------------------


def train_with(ddp: type, options):
    net = mlp(seed=dist.get_rank())
    return steps(ddp(net, **options), net)


@pytest.mark.parametrize(
    "options",
    [
        {"bucket_cap_mb": None, "broadcast_buffers": None, "device_ids": None, "dim": 1},
        {
            "gradient_as_bucket_view": True,
            "batched_grad_copy": True,
            "lazy_bucket_allocation": True,
        },
        {"forward_sync_buffers": False},
        {"mixed_precision": None, "delay_all_reduce_named_params": None},
    ],
)
@pytest.mark.parametrize(("on", "k"), FEW)
def test_the_same_arguments_give_pytorch_s_numbers(ranks_of, on, k, options):
    torch_names = names(TorchDDP.__init__)  # in this version of PyTorch
    compare(ranks_of(on, k), train_with, {n: v for n, v in options.items() if n in torch_names})


# --- refused --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(({name: [1]}, rf"NotImplementedError: .*\({name}=") for name in REFUSED),
        ({"buckets": 3}, "unexpected keyword argument 'buckets'"),
        ({"bucket_cap_mb": [0]}, "PyTorch's second argument is device_ids"),
        ({"device_ids": [0]}, r"device_ids=\[0\] .* these are on cpu"),
        ({"output_device": "cuda:0"}, "output_device=cuda:0"),
    ],
)
def test_what_is_refused_is_refused_by_name(ranks_of, options, message):
    with pytest.raises(RankError, match=message):
        ranks_of("simulated", 1).run(lambda: DistributedDataParallel(mlp(), **options))


# --- the table ------------------------------------------------------------------------------------


def table(heading: str) -> dict[str, str]:
    """Return name → verdict, the first two columns of the table under a heading."""
    text = (ROOT / "docs/ddp_beside_pytorch.md").read_text()
    section = text.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `([\w.]+)` \| (\w[\w ]*?) \|", section, re.MULTILINE)
    assert len({name for name, _ in rows}) == len(rows)
    return dict(rows)


def names(function) -> set[str]:
    parameters = inspect.signature(function).parameters.values()
    return {p.name for p in parameters if p.kind is not p.VAR_KEYWORD} - {"self"}


def test_the_table_has_all_arguments_of_both():
    """And says of none that it is accepted which is refused, or the other way round."""
    rows = table("Arguments of the constructor")
    torch_names, ours = names(TorchDDP.__init__), names(DistributedDataParallel.__init__)
    translated = ACCEPTED.keys() | REFUSED.keys()  # other versions of PyTorch have fewer
    assert torch_names - ours <= translated
    assert rows.keys() == ours | translated
    for name, verdict in rows.items():
        assert (verdict == "not there") == (name in REFUSED), name
        assert (verdict == "ours only") == (name not in torch_names | translated), name
