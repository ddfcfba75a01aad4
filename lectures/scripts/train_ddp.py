r"""Train a small network on the digits with PyTorch's DDP: the whole script of lecture 04.

    torchrun --standalone --nproc-per-node 2 scripts/train_ddp.py --epochs 5
    torchrun --standalone --nproc-per-node 2 --max-restarts 1 scripts/train_ddp.py \
        --checkpoint kept.pt

Every rank runs all of it; torchrun tells each who it is, in environment variables. Only data and
`print` are this course's choice: take the rest along for a model of your own.
"""

import argparse
import os
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from course_lib.data import digits


def options() -> argparse.Namespace:
    """Read the command line; every rank reads the same."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=48, help="rows per step, of all ranks")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches per step and rank")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--bf16", action="store_true", help="matrix products in bfloat16")
    parser.add_argument("--checkpoint", type=Path, help="written after every epoch; gone on from")
    return parser.parse_args()


def join() -> torch.device:
    """Join the process group that torchrun describes; return this rank's device."""
    store, rank, world_size = next(rendezvous("env://"))  # init_process_group's default
    # torchrun keeps the store when it starts all ranks anew: what the dead ones left in it must not
    # be found. (On several machines these counts differ, and the ranks must agree on a name.)
    store = dist.PrefixStore(f"start {os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
    place = {"store": store, "rank": rank, "world_size": world_size}
    if torch.cuda.device_count() < int(os.environ["LOCAL_WORLD_SIZE"]):
        dist.init_process_group("gloo", **place)
        torch.set_num_threads(1)  # the ranks share the cores
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device, **place)
    return device


def log(text: str) -> None:
    """Print once, and not once per rank; at once, so that a killed rank has said it."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def make_loader(data: Dataset, args: argparse.Namespace, device: torch.device) -> DataLoader:
    """Return this rank's share of the data, in micro-batches."""
    parts = dist.get_world_size() * args.accumulate
    if args.batch_size % parts:
        raise SystemExit(f"--batch-size {args.batch_size} is no multiple of {parts}")
    sampler = DistributedSampler(data, shuffle=True, seed=0, drop_last=True)
    return DataLoader(
        data,
        batch_size=args.batch_size // parts,
        sampler=sampler,  # shuffles; shuffle=True here would shuffle apart what it has shared out
        pin_memory=device.type == "cuda",  # so that copies to the GPU need not wait
        drop_last=True,
    )


def train_epoch(model, loader, optimizer, args, device) -> torch.Tensor:
    """Pass once over this rank's share; return its mean loss, still on the device."""
    model.train()
    losses, steps = [], len(loader) // args.accumulate
    for number, (x, y) in enumerate(loader, 1):
        if number > steps * args.accumulate:
            break  # not enough for another step
        x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
        last = number % args.accumulate == 0
        with nullcontext() if last else model.no_sync():
            with torch.autocast(device.type, torch.bfloat16, enabled=args.bf16):
                loss = nn.functional.cross_entropy(model(x), y)
            (loss / args.accumulate).backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses).mean()


@torch.no_grad()
def evaluate(model: nn.Module, data: TensorDataset, device: torch.device) -> float:
    """Return the accuracy of all ranks together: every row counts once, for any number of ranks."""
    model.eval()
    mine = slice(dist.get_rank(), None, dist.get_world_size())
    x, y = (tensor[mine].to(device) for tensor in data.tensors)
    counts = torch.stack([(model(x).argmax(1) == y).sum(), torch.tensor(len(y), device=device)])
    dist.all_reduce(counts)
    return (counts[0] / counts[1]).item()


def save(path: Path, epoch: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write a checkpoint, on rank 0; at no moment is there half a file under its name."""
    if dist.get_rank() == 0:
        state = {"epoch": epoch, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, path.with_suffix(".tmp"))
        os.replace(path.with_suffix(".tmp"), path)


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Go on from a checkpoint, on every rank; return how many epochs are done."""
    if not path.exists():
        return 0
    state = torch.load(path, map_location="cpu", weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    log(f"going on after epoch {state['epoch']}")
    return state["epoch"]


def main() -> None:
    """Train; what one rank does, all do."""
    args, device = options(), join()
    torch.manual_seed(0)
    train_set, test_set = digits()
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), args.lr, fused=True)
    done = load(args.checkpoint, model, optimizer) if args.checkpoint else 0
    ddp = DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)
    loader = make_loader(train_set, args, device)
    for epoch in range(done, args.epochs):
        loader.sampler.set_epoch(epoch)
        loss = train_epoch(ddp, loader, optimizer, args, device)
        dist.all_reduce(loss)
        log(f"epoch {epoch + 1}: loss {loss.item() / dist.get_world_size():.6f}")
        if args.checkpoint:
            save(args.checkpoint, epoch + 1, model, optimizer)
    log(f"test accuracy {evaluate(model, test_set, device):.2%}")
    dist.barrier()  # a rank that leaves early would look to the others like one that died
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
