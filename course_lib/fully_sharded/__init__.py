"""ZeRO-3: every rank keeps 1/K of everything, and gathers a layer's weights while it runs.

    >>> from course_lib.fully_sharded import FullyShardedDataParallel
    >>> model = FullyShardedDataParallel(model)
    >>> optimizer = torch.optim.AdamW(model.parameters())  # of this rank's pieces

Read in this order:

- `unit`: gathers and frees the parameters of one module, and reduce-scatters their gradients
- `wrapper`: decides when, so that the network is one layer ahead

S. Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC
2020, section 5.3; Y. Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data
Parallel", VLDB 2023.
"""

from course_lib.fully_sharded.wrapper import FullyShardedDataParallel
