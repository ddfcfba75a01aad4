"""The capstone: train to a target loss, fast, and be timed by a clock that nobody can bend.

A student's function runs as it is; what it computes and sends is written on a *tape*
(`recorder`). The referee plays the tapes of all ranks again, on another draw of the problem, on a
network with a virtual clock (`player`, `referee`). The score is that run's: its time, from a price
list (`operators`), its bytes, its loss. Nothing else a student's process does can count: it is not
on the tape. As with a CUDA graph, what is on it no longer depends on the numbers.

In which order to read: `race`, `tape`, `constants`, `operators`, `handle`, `recorder`, `player`,
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
