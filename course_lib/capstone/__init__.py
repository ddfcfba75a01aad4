"""The capstone: train to a target loss as fast as possible, on a clock that nobody can cheat.

A student's function runs unchanged; its computations and messages are written on a *tape*
(`recorder`). The referee plays the tapes of all ranks again, on a different draw of the problem, on
a network with a virtual clock (`player`, `referee`). The score comes from the second run: its time,
from a price list (`operators`), its bytes, its loss. Nothing else in a student's process can count,
because it is not on the tape. As with a CUDA graph, the tape does not depend on the numbers.

Read in this order: `race`, `tape`, `constants`, `operators`, `handle`, `recorder`, `player`,
`referee`, `rehearsal`.
"""

from course_lib.capstone.operators import LAUNCH
from course_lib.capstone.race import DEVICE, Draw, Job, Race, draw, write_tape
from course_lib.capstone.referee import Score, referee, speed_of_light
from course_lib.capstone.rehearsal import rehearse
from course_lib.capstone.tape import TapeError

__all__ = [
    "DEVICE",
    "LAUNCH",
    "Draw",
    "Job",
    "Race",
    "Score",
    "TapeError",
    "draw",
    "referee",
    "rehearse",
    "speed_of_light",
    "write_tape",
]
