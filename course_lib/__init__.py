"""From mini-batch SGD to DDP: the reference implementations, in reading order.

- `data`: the digits and a synthetic problem, without a download
- `sgd`: mini-batch SGD, and how noisy its gradient is
- `sharding`: who holds which part of the data
- `replicas`: data parallelism inside one process
- `point_to_point`: messages between two ranks
- `rooted_collectives`: broadcast, reduce, scatter, gather
- `ring`: reduce-scatter, all-gather, and the ring made of them
- `pipelined_ring`: the same in segments
- `collectives`: all-reduce in five ways, and all of the above
- `cost_model`: how long each takes
- `bucket_size`: how large a bucket should be
- `bucketing`: which gradients travel together
- `gradient_sync`: averaging per parameter, flat, in buckets
- `tuned_all_reduce`: the fastest algorithm for each size
- `module_states`: equal weights and buffers on all ranks
- `comm_hooks`: what is done with a full bucket, left open
- `communication_stream`: a GPU stream beside the one that computes
- `bucket_memory`: where the gradients of all buckets lie
- `backward_hooks`: when a gradient is ready, and when backward is over
- `reducer_errors`, `reducer`: buckets that leave during backward
- `uneven_inputs`: ranks that run out of batches
- `ddp`: DistributedDataParallel
- `peer_memory`: all-reduce without messages, on one machine
- `shared_pages`, `shared_memory`: the same on the CPU
- `symmetric_memory`: the same between GPUs
- `shared_memory_group`: a backend made of it

Beside them: `train` trains a real model with them, `ranks` runs functions on several ranks,
`checking` examines what students write, `figures` draws.
"""

from __future__ import annotations

from typing import Any


def load_ipython_extension(ipython: Any) -> None:
    """Make ``%ranks`` and ``%%ranks`` known: what ``%load_ext course_lib`` calls."""
    from course_lib.ranks.magic import load_ipython_extension as load

    load(ipython)
