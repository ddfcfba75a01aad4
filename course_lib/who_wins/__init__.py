"""Who wins, and when: which algorithm trains to a target loss first, on which network.

    $ python -m course_lib.who_wins --figure map.png

Every algorithm of the course trains the same model on the same data, on simulated ranks, for real.
The clock is virtual, so the answer is exact and the same on every machine. Read in this order:

- `problem`: what is trained, on which device, until when
- `rates`: learning rates, the same tries for each
- `algorithms`: the contestants, each put together from the course's modules
- `measure`: what is executed, and what follows from it
- `records`, `sweep`: all runs of a map, resumable
- `winners`: who wins a cell, and whether that is clear
- `report`, `figure`: tables, the map, and what BAGUA's paper says
- `tune`: makes the table that `rates` reads
"""

from course_lib.who_wins.algorithms import ALGORITHMS, COMPARED_BY_BAGUA, Algorithm
from course_lib.who_wins.problem import Problem, network_of
from course_lib.who_wins.winners import Cell

__all__ = ["ALGORITHMS", "COMPARED_BY_BAGUA", "Algorithm", "Cell", "Problem", "network_of"]
