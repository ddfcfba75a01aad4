"""Train a real model with the whole course's code, on any number of ranks.

    torchrun --nproc-per-node 4 -m course_lib.train --model transformer --checkpoint runs/text
    python -m course_lib.train --model cnn              # one rank
    Ranks(4).run(train, TrainConfig(model="mlp"))       # in a notebook, also on simulated ranks

Read in this order:

- `config`: the options; `datasets` and `models`: the data and the models
- `loop`: `train`, the whole run; `trainer`: one rank's replica and one step of it; `precision`
- `checkpoint`: how a run continues after a rank was killed, also with fewer ranks
- `progress`: the messages during a run; `stages`: where the time of a step goes
- `__main__`: the command line
"""

from course_lib.train.config import ConfigError, TrainConfig
from course_lib.train.loop import TrainResult, train
