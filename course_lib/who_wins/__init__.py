"""Find out which algorithm reaches a target loss first, on which network.

    $ python -m course_lib.who_wins --latencies 1e-3 --bandwidths 1e5 1e6 1e7

Every algorithm of the course trains the same model on the same data, on simulated ranks. Only the
clock is virtual, so the answer is exact and the same on every machine. Read in this order:

- `problem`: the model, the data, the device and the target
- `settings`: optimizers and learning rates; the same ones were tried for every algorithm
- `algorithms`: the contestants, each built from the course's modules
- `measure`: the runs, and the times that follow from them
- `sweep`: all runs of a map, in several processes
- `winners`: which algorithm wins a cell, and whether that is clear
- `report`: the map and its conditions, as tables
"""

from course_lib.who_wins.algorithms import ALGORITHMS, Algorithm
from course_lib.who_wins.problem import Problem, network_of
from course_lib.who_wins.winners import Cell
