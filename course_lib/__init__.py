"""From mini-batch SGD to DDP: the reference implementations, in reading order.

- `data`: the digits and a synthetic problem, without a download
- `sgd`: mini-batch SGD, and how noisy its gradient is
- `sharding`: who holds which part of the data
- `replicas`: data parallelism inside one process
- `cost_model`: how long messages and collectives take
- `collectives`: broadcast to all-reduce, from messages between two ranks
- `bucketing`: which gradients travel together, and how many bytes of them
- `gradient_sync`: averaging per parameter, flat, in buckets
- `ddp`: DistributedDataParallel, with buckets that leave during backward
- `peer_memory`: all-reduce without messages, on one machine
- `compression`: gradients in fewer bytes, and what that costs
- `sharded_optimizer`: ZeRO-1 and 2, each rank the optimizer of one K-th
- `fully_sharded`: ZeRO-3, weights that are there while a layer runs
- `rematerialize`: activations computed again in place of kept
- `tensor_parallel`: one matrix over several ranks
- `pipeline_parallel`: the layers over the ranks, and micro-batches through them
- `expert_parallel`: the experts over the ranks, and tokens that travel to them
- `context_parallel`: the sequence over the ranks, and keys and values that go round
- `mesh`: data, pipeline, expert and tensor parallelism of one transformer, a line each
- `local_sgd`: many steps alone, one together; and one step late
- `asynchronous`: a server, and workers that do not wait for one another
- `decentralized`: averaging with neighbours only

Beside them: `train` trains a real model with them, `simulate` predicts what a step takes, `ranks`
runs functions on several ranks, `checking` examines what students write, `learner` is the program
`course` and hands out their copies, `capstone` times a race, `who_wins` has the
algorithms race, `running_model` trains one transformer in every way, `compare` says where a run on
K ranks differs from one rank, and `figures` draws; `_later` puts imports off.
"""

from __future__ import annotations

from typing import Any

READING_ORDER = (
    *("sgd", "sharding", "replicas", "cost_model", "collectives"),
    *("bucketing", "gradient_sync", "ddp", "peer_memory", "compression"),
    *(
        "sharded_optimizer",
        "fully_sharded",
        "rematerialize",
        "tensor_parallel",
        "pipeline_parallel",
    ),
    *("expert_parallel", "context_parallel", "mesh", "local_sgd", "asynchronous"),
    "decentralized",
)
"""The rungs of the ladder: each knows only those before it. An assignment hides from one on."""


def load_ipython_extension(ipython: Any) -> None:
    """Make ``%ranks`` and ``%%ranks`` known: what ``%load_ext course_lib`` calls."""
    from course_lib.ranks.notebook.magic import load_ipython_extension as load

    load(ipython)
