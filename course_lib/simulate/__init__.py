"""Predict the time, memory and bytes of a training step, before anybody buys the cluster.

    >>> from course_lib.simulate import CLUSTERS, Layout, Transformer, estimate
    >>> gpt3 = Transformer(layers=96, width=12288, heads=96, vocabulary=51200)
    >>> layout = Layout(data=8, tensor=8, pipeline=8, batch=1536, recompute="full")
    >>> step = estimate(gpt3, CLUSTERS["selene"], layout)

A model, a cluster and a layout are three small tables of numbers; `estimate` combines the formulas
that the lectures derive. On the command line: ``python -m course_lib.simulate --help``. Read in
this order:

- `transformer`: parameters, operations and bytes of activations
- `cluster`: devices and links, and the share of their peak that a program reaches
- `layout`: how the model is spread over the ranks
- `group_time`: collectives in groups that share nodes
- `parameters`, `memory`, `traffic`, `step_time`: the results of all these
- `published`: runs that others have measured, beside the formulas
- `search`: the fastest layout that fits
- `failures`: the share of time that is useful training if devices fail
- `report`: tables for people
"""

from course_lib.simulate.cluster import CLUSTERS, Cluster, Reached
from course_lib.simulate.layout import Layout, LayoutError
from course_lib.simulate.memory import Memory
from course_lib.simulate.step_time import Estimate, estimate
from course_lib.simulate.traffic import Traffic
from course_lib.simulate.transformer import Transformer
