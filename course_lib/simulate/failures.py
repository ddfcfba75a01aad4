"""Failures: the share of a cluster's time that trains if devices fail.

    >>> from course_lib.simulate.failures import Fleet, best_interval, restarting
    >>> fleet = Fleet(devices=16384, device_mtbf=50_000 * 3600)
    >>> f"one failure every {fleet.mtbf / 3600:.1f} hours"
    'one failure every 3.1 hours'

N devices fail independently, each every m seconds on average, so some device fails every M = m/N
seconds. A checkpoint is saved every τ seconds, which takes δ seconds. After a failure it takes R
seconds until all train again, and the work since the last checkpoint is lost. The expected time for
τ seconds of work is

    M e^(R/M) (e^((τ+δ)/M) - 1)

and the *effective* share is τ divided by that. The best τ is near √(2δM) (Young), more exactly

    √(2δM) (1 + √(δ/2M)/3 + (δ/2M)/9) - δ     for δ < 2M, else M      (Daly)

There are three ways to handle failures. *Restart*: all restart from the checkpoint. *Shrink*: the
other replicas continue after a short stall, and the broken one comes back after its repair.
*Spares*: a standby device takes over, until none is left.

J. W. Young, "A first order approximation to the optimum checkpoint interval", CACM 17, 1974;
J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future
Generation Computer Systems 22, 2006.
"""

import math
import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Fleet:
    """Devices that fail, and the times that a failure costs.

    Args:
        devices: N.
        device_mtbf: m, seconds between two failures of one device, on average.
        checkpoint: δ, seconds for which training stops to save.
        restart: R, seconds from a failure until all devices train again.
        stall: seconds for which the others stop when one replica fails or is replaced.
        repair: seconds until a broken device is back.
        replica: devices of one replica, which drop out together.
        spares: devices on standby; they belong to `devices` but do not train.

    """

    devices: int
    device_mtbf: float
    checkpoint: float = 60.0
    restart: float = 600.0
    stall: float = 180.0
    repair: float = 24 * 3600.0
    replica: int = 8
    spares: int = 0

    @property
    def mtbf(self) -> float:
        """M, seconds between two failures of any device."""
        return self.device_mtbf / self.devices


def young_interval(fleet: Fleet) -> float:
    """Return √(2δM), the best seconds between checkpoints to first order."""
    return math.sqrt(2 * fleet.checkpoint * fleet.mtbf)


def best_interval(fleet: Fleet) -> float:
    """Return Daly's estimate of the best seconds of work between two checkpoints."""
    delta, mean = fleet.checkpoint, fleet.mtbf
    if delta >= 2 * mean:
        return mean
    ratio = delta / (2 * mean)
    return math.sqrt(2 * delta * mean) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - delta


def restarting(fleet: Fleet, interval: float | None = None) -> float:
    """Return the effective share of time if all restart from the last checkpoint.

    `interval` is τ; the default is the best one. Spares are idle.
    """
    tau = best_interval(fleet) if interval is None else interval
    mean = fleet.mtbf
    expected = mean * math.exp(fleet.restart / mean) * math.expm1((tau + fleet.checkpoint) / mean)
    return tau / expected * (1 - fleet.spares / fleet.devices)


def shrinking(fleet: Fleet) -> float:
    """Return the effective share if the other replicas continue without the broken one.

    The others stop for `stall` seconds twice: when the broken replica drops out, and when it is
    back. A replica is away for `repair` seconds after each failure of one of its devices, and its
    work is not done meanwhile. Nothing is computed again, because the others have the weights.
    """
    trains = fleet.device_mtbf / fleet.replica
    present = trains / (trains + fleet.repair)
    standing = 2 * fleet.stall * present / fleet.mtbf
    return present / (1 + standing) * (1 - fleet.spares / fleet.devices)


def with_spares(fleet: Fleet) -> float:
    """Return the effective share if a standby device replaces a broken one.

    Broken devices are repaired in parallel, so the number of devices away is that of a queue
    without waiting: a Poisson number with mean repair/M. If more devices are away than there are
    spares, each device without a spare means one missing replica.
    """
    working = fleet.devices - fleet.spares
    away = working * fleet.repair / fleet.device_mtbf
    chance, gone = math.exp(-away), 0
    covered, left = 0.0, 1.0  # expectation of min(number away, spares); chance of more than `gone`
    while gone < fleet.spares:
        left -= chance
        covered += left
        gone += 1
        chance *= away / gone
    uncovered = max(0.0, away - covered)
    lost = min(1.0, uncovered * fleet.replica / working)
    standing = fleet.stall * working / fleet.device_mtbf
    return (1 - lost) / (1 + standing) * working / fleet.devices


def replay(fleet: Fleet, seconds: float, interval: float | None = None, seed: int = 0) -> float:
    """Return the effective share of one random history of failures, with restarts.

    The mean over seeds is `restarting`; one history of a few failures may be far from it.
    """
    rng = random.Random(seed)
    tau = best_interval(fleet) if interval is None else interval
    now = saved = 0.0
    failure = rng.expovariate(1 / fleet.mtbf)
    while now < seconds:
        over = now + tau + fleet.checkpoint
        if over <= failure:
            now, saved = over, saved + tau
            continue
        now = failure
        while now >= failure:  # a failure during the restart begins it again
            failure = now + rng.expovariate(1 / fleet.mtbf)
            if now + fleet.restart <= failure:
                now += fleet.restart
                break
            now = failure
    return saved / now * (1 - fleet.spares / fleet.devices)
