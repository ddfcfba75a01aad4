"""A mesh: data × pipeline × expert × tensor parallelism of one small transformer.

    >>> from course_lib.mesh import Shape, average_gradients, divide_experts, divide_tensors
    >>> from course_lib.mesh import make_mesh, next_word_loss, transformer
    >>> from course_lib.pipeline_parallel import Pipeline, one_forward_one_backward, split_layers
    >>> mesh = make_mesh(data=1, tensor=2)  # two ranks
    >>> _ = torch.manual_seed(0)  # the same model on all ranks, of which each keeps its part
    >>> model = transformer(Shape(experts=2))
    >>> divide_tensors(model, mesh["tensor"])
    >>> divide_experts(model, mesh["expert"])
    >>> stages = split_layers(model, mesh.sizes["pipeline"])
    >>> schedule = one_forward_one_backward(len(stages), micro_batches=2)
    >>> model = Pipeline(stages, next_word_loss, schedule, group=mesh["pipeline"])
    >>> tokens = torch.zeros(4, 17, dtype=torch.long)  # this rank's: `batch_of`
    >>> loss = model.step(tokens[:, :-1], tokens[:, 1:])
    >>> average_gradients(model, mesh)

Each kind of parallelism cuts and sends something different:

                cuts           a rank holds         a rank sends per step
    data        the batch      all weights          gradients, once
    pipeline    the layers     L/P layers           activations, at each boundary
    expert      the experts    E/X experts          the tokens of each layer, four times
    tensor      the matrices   1/T of each          the activations of each layer, four times

With all of them, the weights after a step are the same as in one process, for every layout. Read in
this order:

- `axes`: the coordinates and groups of each rank
- `transformer`: the model, in one process
- `divide`: the changes that each axis makes to it, one line per axis
- `traffic`: the bytes of each axis, as formulas

M. Shoeybi et al., "Megatron-LM", 2019; D. Narayanan et al., "Efficient Large-Scale Language Model
Training on GPU Clusters Using Megatron-LM", SC 2021; D. Lepikhin et al., "GShard", ICLR 2021.
"""

from course_lib.mesh.axes import AXES, Mesh, make_mesh
from course_lib.mesh.divide import average_gradients, batch_of, divide_experts, divide_tensors
from course_lib.mesh.traffic import traffic, weights_held
from course_lib.mesh.transformer import Shape, next_word_loss, transformer
