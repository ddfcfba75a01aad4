"""The checks of this assignment. They are handed out.

If a judge is too long to read here, write it in judges.py beside this file, and import it:
from .judges import …
"""

import torch

from course_lib.checking import Case, equals, in_many_forms, only_peers, sends_at_most, task


def inputs(case, generator):  # what each rank has: a dict of plain values
    return [
        {"x": torch.randn(case.parameters["length"], 2, generator=generator)}
        for _ in range(case.world_size)
    ]


def program(rotate, mine, given):  # on every rank; its keys are the words of the report
    return {"neighbour's tensor": rotate(mine["x"], group=given.group)}


def neighbours(inputs, me, distance):
    return {"neighbour's tensor": inputs[(me + distance) % len(inputs)]["x"]}


def both_sides(case, rank):
    members = case.members(rank)
    me = members.index(rank)
    return {members[me - 1], members[(me + 1) % len(members)]}


CHECKS = {
    "rotate": task(
        "rotate",
        inputs=inputs,
        program=program,
        judges=[
            equals(
                lambda case, inputs, me: neighbours(inputs, me, -1),
                {
                    "the right neighbour's: the direction is wrong": lambda case, inputs, me: (
                        neighbours(inputs, me, +1)
                    )
                },
            )
        ],
        expects=[
            only_peers(both_sides),
            sends_at_most(lambda case, rank: 2 * case.parameters["length"] * case.itemsize),
        ],
        worth={"values": 3, "communication": 1},
        cases=in_many_forms(
            *(
                Case(f"{k} ranks, length {n}", k, {"length": n})
                for k, n in ((1, 3), (2, 4), (3, 1), (4, 5), (5, 0))
            )
        ),
    ),
}
