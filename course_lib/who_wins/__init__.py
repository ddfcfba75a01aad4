"""Find out which algorithm reaches a target loss first, on which network.

    $ python -m course_lib.who_wins --figure map.png

Every algorithm of the course trains the same model on the same data, on simulated ranks. Only the
clock is virtual, so the answer is exact and the same on every machine. Read in this order:

- `problem`: the model, the data, the device and the target
- `settings`: optimizers and learning rates; the same ones are tried for every algorithm
- `algorithms`: the contestants, each built from the course's modules
- `measure`: the runs, and the times that follow from them
- `records`, `sweep`: all runs of a map; an interrupted sweep can continue
- `winners`: which algorithm wins a cell, and whether that is clear
- `report`, `figure`: tables, the map, and a comparison with BAGUA's paper
- `tune`: makes the table that `settings` reads
"""

from course_lib.who_wins.algorithms import ALGORITHMS, COMPARED_BY_BAGUA, Algorithm
from course_lib.who_wins.problem import Problem, network_of
from course_lib.who_wins.winners import Cell

__all__ = ["ALGORITHMS", "COMPARED_BY_BAGUA", "Algorithm", "Cell", "Problem", "network_of"]
