"""DistributedDataParallel: equal replicas, and gradients that are sent during backward.

    >>> from course_lib.ddp import DistributedDataParallel
    >>> model = DistributedDataParallel(model)  # then train it as on one GPU

Read `functions` first, the three functions of assignment 05, in one page. `minimal` wraps a module
with them: lecture 05 builds it. The others are for every model, with the interface of PyTorch's
class:

- `hooks`: when a gradient is ready, when backward is over, and your own way to average a bucket
- `buffers`: equal weights at the start, and equal buffers afterwards
- `reducer`: buckets that are sent during backward
- `uneven_inputs`: ranks that run out of batches
- `wrapper`: the class, with PyTorch's names
- `script`: what a training script needs around it: batches, accumulation, evaluation, checkpoints
"""

from course_lib.ddp.buffers import broadcast_module_states, verify_same_model
from course_lib.ddp.hooks import CommHook, EndOfBackward, GradBucket, all_reduce_hook
from course_lib.ddp.minimal import MinimalDDP
from course_lib.ddp.wrapper import DistributedDataParallel
