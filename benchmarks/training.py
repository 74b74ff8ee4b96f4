"""Time training steps of one GPT under mpizero and under what users would pick instead, in one sitting.

    python benchmarks/training.py [--ranks 2] [--batch 4] [--rounds 3] [--kinds compute,mpizero-3,fsdp2,...]

Each kind is started `rounds` times, in turn, so that a drift of the machine meets all alike; a kind's figure is the
median over its launches of the median step. `compute` is as many processes at once as there are ranks, with the same
optimizer and no communication: the floor. Prints a table and writes JSON under benchmarks/results/.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from datetime import datetime, timezone
from pathlib import Path

HERE = Path(__file__).resolve().parent
KINDS = ("compute", "mpizero-0", "mpizero-1", "mpizero-2", "mpizero-3", "ddp", "fsdp2")
WARM_UP = 2


def worker(kind: str, batch: int, steps: int) -> None:
    """Time `steps` steps in this rank; rank 0 prints one line of JSON."""
    import torch

    sys.path.insert(0, str(HERE.parent / "examples"))
    from train_gpt import GPT, Block

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = GPT(dim=512, heads=8, layers=8)
    rank, barrier = 0, None
    if kind.startswith("mpizero"):
        import mpizero as mz

        rank, barrier = mz.world().rank, mz.barrier
        mz.shard(model, stage=int(kind[-1]), units={Block})
    elif kind != "compute":
        import torch.distributed as dist

        dist.init_process_group("gloo")
        rank, barrier = dist.get_rank(), dist.barrier
        model = peer(kind, model, Block)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = torch.Generator().manual_seed(rank)
    times = []
    for _ in range(steps):
        x = torch.randint(0, 256, (batch, 128), generator=data)
        if barrier is not None:
            barrier()
        start = time.perf_counter()
        optimizer.zero_grad()
        loss = model(x, x.roll(-1, 1))
        loss.backward()
        optimizer.step()
        times.append(time.perf_counter() - start)
    line = {"ms": statistics.median(times[WARM_UP:]) * 1e3, "loss": loss.item()}
    if kind.startswith("mpizero"):
        held = mz.memory_report(model, optimizer).measured
        line["bytes"] = {name: getattr(held, name) for name in ("parameters", "gradients", "optimizer")}
    if rank == 0:
        print(json.dumps(line), flush=True)


def peer(kind: str, model, block):
    """Wrap a model in torch's own data parallelism or sharding, on gloo."""
    if kind == "ddp":
        from torch.nn.parallel import DistributedDataParallel

        return DistributedDataParallel(model)
    from torch.distributed.fsdp import fully_shard

    for module in model.modules():
        if isinstance(module, block):
            fully_shard(module)
    return fully_shard(model)


def launch(kind: str, args: argparse.Namespace) -> dict:
    """Start one kind and return what its rank 0 measured, the step in milliseconds (`ms`) among it."""
    worker_args = ["--worker", kind, "--batch", str(args.batch), "--steps", str(args.steps)]
    script = [sys.executable, __file__, *worker_args]
    ranks = str(args.ranks)
    if kind == "compute":
        jobs = [subprocess.Popen(script, stdout=subprocess.PIPE, text=True) for _ in range(args.ranks)]
        outputs = [job.communicate(timeout=600)[0] for job in jobs]
        return {"ms": statistics.median(json.loads(output.splitlines()[-1])["ms"] for output in outputs)}
    if kind.startswith("mpizero"):
        command = [sys.executable, str(HERE.parent / "bin" / "mzrun"), "-n", ranks, *script[1:]]
    else:
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", ranks, *script[1:]]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        sys.exit(f"{kind} failed:\n{done.stdout}\n{done.stderr}")
    return json.loads(lines[-1])


def main() -> None:
    """Run the kinds in turn, print the table, write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--worker", choices=KINDS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args.worker, args.batch, args.steps)
        return
    kinds = args.kinds.split(",")
    unknown = set(kinds) - set(KINDS)
    if unknown:
        parser.error(f"--kinds must be among {', '.join(KINDS)} (got {', '.join(sorted(unknown))})")
    measured: dict[str, list[dict]] = {kind: [] for kind in kinds}
    for _ in range(args.rounds):
        for kind in kinds:
            measured[kind].append(launch(kind, args))
    report(args, measured)


def report(args: argparse.Namespace, measured: dict[str, list[dict]]) -> None:
    """Print step times as medians with their range, and as ratios to compute within the same round."""
    import torch

    floor = [run["ms"] for run in measured.get("compute", [])]
    print(
        f"GPT 25.5M, fp32, {args.ranks} ranks, batch {args.batch} per rank, {args.rounds} rounds of {args.steps} steps"
    )
    print(f"{'kind':<12}{'step ms':>9}{'min':>8}{'max':>8}{'over compute':>14}")
    rows = []
    for kind, runs in measured.items():
        times = [run["ms"] for run in runs]
        ratio = statistics.median(t / f for t, f in zip(times, floor, strict=True)) if floor else None
        rows.append({"kind": kind, "ms": times, "over_compute": ratio, "bytes": runs[-1].get("bytes")})
        shown = "" if ratio is None else f"{ratio:.3f}"
        print(f"{kind:<12}{statistics.median(times):>9.0f}{min(times):>8.0f}{max(times):>8.0f}{shown:>14}")
    now = datetime.now(timezone.utc)
    result = {
        "schema_version": 1,
        "benchmark": "training",
        "date": now.strftime("%Y-%m-%d"),
        "machine": {"cores": os.cpu_count(), "processor": platform.machine(), "python": platform.python_version()},
        "torch": torch.__version__,
        "ranks": args.ranks,
        "batch": args.batch,
        "rows": rows,
    }
    name = f"{now:%Y-%m-%d}-training-{args.ranks}ranks-batch{args.batch}.json"
    path = HERE / "results" / name
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"written to benchmarks/results/{name}")


if __name__ == "__main__":
    main()
