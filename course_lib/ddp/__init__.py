"""DistributedDataParallel: equal replicas, and gradients that are sent during backward.

    >>> from course_lib.ddp import DistributedDataParallel
    >>> model = DistributedDataParallel(model)  # then train it as on one GPU

Read in this order:

- `module_states`: equal weights and buffers on all ranks
- `comm_hooks`: your own way to average a full bucket
- `communication_stream`: a second GPU stream, for communication
- `bucket_memory`: the memory for the gradients of all buckets
- `backward_hooks`: when a gradient is ready, and when backward is over
- `uses`: how often backward adds to a gradient before it is ready
- `errors`, `reducer`: buckets that are sent during backward
- `buffers`: buffers, which gradients do not keep equal
- `uneven_inputs`: ranks that run out of batches
- `around_forward`: all of these together, before and after each forward
- `pytorch_arguments`, `wrapper`: the class, with PyTorch's names
"""

from course_lib.ddp.comm_hooks import CommHook, GradBucket, all_reduce_hook
from course_lib.ddp.module_states import broadcast_module_states, verify_same_model
from course_lib.ddp.wrapper import DistributedDataParallel

__all__ = [
    "CommHook",
    "DistributedDataParallel",
    "GradBucket",
    "all_reduce_hook",
    "broadcast_module_states",
    "verify_same_model",
]
