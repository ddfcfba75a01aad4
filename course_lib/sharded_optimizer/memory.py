"""The memory for weights, gradients and optimizer state on one rank.

    >>> from course_lib.sharded_optimizer import model_state_bytes
    >>> [model_state_bytes(7.5e9, world_size=64, stage=stage) / 1e9 for stage in (0, 1, 2, 3)]
    [120.0, 31.40625, 16.640625, 1.875]

These are the numbers of figure 1 of S. Rajbhandari et al., "ZeRO", SC 2020. Activations need
more memory; see `rematerialize`.
"""


def model_state_bytes(
    parameters: float,
    world_size: int,
    stage: int,
    weight: float = 2,
    gradient: float = 2,
    state: float = 12,
) -> float:
    """Return the bytes that one of `world_size` ranks holds of a model of `parameters` numbers.

    `stage` is the ZeRO stage: 0 shards nothing (DDP), 1 the optimizer state, 2 also the gradients,
    3 also the weights. `weight`, `gradient` and `state` are bytes per parameter. The defaults are
    for Adam in mixed precision, whose state holds fp32 master weight, momentum and variance. Plain
    fp32 Adam has 4, 4 and 8.

    Raises ValueError if `stage` is not 0, 1, 2 or 3.
    """
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"stage must be 0, 1, 2 or 3, got {stage}")
    parts = [weight, gradient, state]  # stage s divides the last s of them
    return parameters * sum(
        part / (world_size if place + stage >= len(parts) else 1)
        for place, part in enumerate(parts)
    )
