"""From mini-batch SGD to DDP: the reference implementations, in reading order.

- `data`: the digits and a synthetic problem, without a download
- `sgd`: mini-batch SGD, and how noisy its gradient is
- `sharding`: which rank holds which part of the data
- `cost_model`: how long messages and collectives take
- `collectives`: broadcast to all-reduce, from messages between two ranks
- `bucketing`: which gradients are sent together, and how large a bucket is
- `gradient_sync`: gradients averaged per parameter, all at once, or in buckets
- `guard`: whether parameters are still what they were when a wrapper took them
- `ddp`: DistributedDataParallel, with buckets that are sent during backward
- `frontier`: which rank delayed a step, and in which stage
- `compression`: gradients in fewer bytes, and what that costs
- `parts`: tensors that know that other ranks hold the rest, and norms over all of them
- `sharded_optimizer`: ZeRO-1 and 2, in which each rank updates one K-th of the parameters
- `fully_sharded`: ZeRO-3, in which a rank holds all weights of a layer only while the layer runs
- `rematerialize`: activations that are computed again instead of kept
- `tensor_parallel`: one matrix divided over several ranks
- `pipeline_parallel`: layers divided over the ranks, and micro-batches that pass through them
- `expert_parallel`: experts divided over the ranks, and tokens that are sent to them
- `context_parallel`: a sequence divided over the ranks, and keys and values that go round
- `mesh`: data, pipeline, expert and tensor parallelism of one transformer, a line each
- `local_sgd`: many local steps, then one common step; and gradients applied one step late
- `asynchronous`: a server, and workers that do not wait for one another
- `decentralized`: averaging with neighbours only

The other packages use these modules or serve them. `train` trains a real model with them.
`simulate` predicts how long a step takes. `ranks` runs functions on several ranks. `checking`
examines what students write. `learner` is the program `course`, which also hands out the students'
copies. `capstone` times a race. `who_wins` compares the speed of the algorithms. `many_models`
trains small models side by side. `running_model` trains one transformer in every way. `compare`
reports where a run on K ranks differs from a run on one rank. `figures` draws. `_later` postpones
imports.
"""

from __future__ import annotations

from typing import Any

READING_ORDER = (
    *("sgd", "sharding", "cost_model", "collectives"),
    *("bucketing", "gradient_sync", "guard", "ddp", "frontier", "compression", "parts"),
    *("sharded_optimizer", "fully_sharded", "rematerialize", "tensor_parallel"),
    *("pipeline_parallel", "expert_parallel", "context_parallel", "mesh"),
    *("local_sgd", "asynchronous", "decentralized"),
)
"""The modules from simple to advanced; each imports only modules before it in this order.

An assignment hides one of them and all that follow.
"""


def load_ipython_extension(ipython: Any) -> None:
    """Register the magics ``%ranks`` and ``%%ranks``; ``%load_ext course_lib`` calls this."""
    from course_lib.ranks.notebook.magic import load_ipython_extension as load

    load(ipython)
