"""ZeRO stages 1 and 2: every rank keeps 1/K of the optimizer's state, and of the gradients.

    >>> from course_lib.sharded_optimizer import ShardedOptimizer
    >>> optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)

Replicas that train with DDP hold the same optimizer state K times. Mixed precision with Adam keeps
2 bytes of weight, 2 of gradient and 12 of state (fp32 master weight, momentum, variance) for each
of Ψ parameters. But it is enough if one rank updates each parameter:

                     weights   gradients   state     bytes, K = 4     a rank sends, in numbers
    DDP                 2Ψ        2Ψ        12Ψ          16 Ψ             2Ψ
    ZeRO-1              2Ψ        2Ψ        12Ψ/K         7 Ψ             2Ψ
    ZeRO-2              2Ψ        2Ψ/K      12Ψ/K       5.5 Ψ             2Ψ
    ZeRO-3              2Ψ/K      2Ψ/K      12Ψ/K         4 Ψ             3Ψ     `fully_sharded`

(A rank actually sends (K-1)/K of these numbers, as in any ring.) Read in this order:

- `memory`: the table as a formula
- `partition`: flat buffers cut into K chunks, and which piece of which parameter a rank has
- `minimal`: ZeRO-1 in one page, each step with PyTorch's own collectives
- `optimizer`: each rank updates its pieces, then all ranks gather the weights
- `states`: a state_dict as of one process, which can be loaded on a different number of ranks
- `gradients`: stage 2, gradients that are reduce-scattered during backward

`parts` says how to clip, and how a `GradScaler` works, where no rank has the whole gradient.

S. Rajbhandari, J. Rasley, O. Ruwase and Y. He, "ZeRO: Memory Optimizations Toward Training Trillion
Parameter Models", SC 2020.
"""

from typing import TYPE_CHECKING

from course_lib._later import later
from course_lib.sharded_optimizer.memory import model_state_bytes

if TYPE_CHECKING:
    from course_lib.sharded_optimizer.minimal import sharded_optimizer
    from course_lib.sharded_optimizer.optimizer import ShardedOptimizer
    from course_lib.sharded_optimizer.partition import (
        FlatChunks,
        all_gather_chunks,
        start_all_gather,
        start_reduce_scatter,
    )
    from course_lib.sharded_optimizer.states import gather_states, pieces_of_states

# The memory formula does not need PyTorch.
__getattr__, __dir__ = later(
    __name__,
    {
        "ShardedOptimizer": "optimizer",
        "sharded_optimizer": "minimal",
        "FlatChunks all_gather_chunks": "partition",
        "start_all_gather start_reduce_scatter": "partition",
        "gather_states pieces_of_states": "states",
    },
)
