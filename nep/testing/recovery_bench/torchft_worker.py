"""A rank under torchft: fault-tolerant data parallelism of the whole model, one replica group of one process each.

    python nep/testing/recovery_bench/torchft_worker.py FOLDER RANK NUM_RANKS
    python nep/testing/recovery_bench/torchft_worker.py --lighthouse FOLDER

Runs in an environment that has torchft. After the manner of torchft's own example (train_ddp.py, README): a manager
per process, gradients through its DistributedDataParallel, the optimizer wrapped, and a lighthouse that all ask for a
quorum.
The model is whole on every rank: torchft's replicas share nothing, so there are no experts to spread over them.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import torch
import torch.distributed as dist
import torchft
from torch import Tensor, nn

from nep.moe.experts import expert_slices
from nep.planning.layout import LineKind
from nep.testing.recovery_bench.journal import Journal
from nep.testing.recovery_bench.settings import TorchftSettings
from nep.testing.recovery_bench.work import Work


class MeanLoss(nn.Module):
    """The model with a loss for an output, which DistributedDataParallel can look through."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean over these tokens."""
        return self.model(tokens, targets).loss.total / targets.numel()


def lighthouse(settings: TorchftSettings, address: Path) -> None:
    """Serve until told to stop; its address goes into a file."""
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(
        bind="127.0.0.1:0",
        min_replicas=1,
        join_timeout_ms=settings.join_timeout_ms,
        quorum_tick_ms=settings.quorum_tick_ms,
        heartbeat_timeout_ms=settings.heartbeat_timeout_ms,
    )
    unfinished = address.with_suffix(".unfinished")
    unfinished.write_text(f"http://127.0.0.1:{server.address().rpartition(':')[2].strip('/')}")
    os.replace(unfinished, address)
    signal.pause()


def main(work: Work, rank: int, size: int, settings: TorchftSettings) -> int:
    """Train until killed."""
    torch.set_num_threads(1)
    journal = Journal(work.folder, rank)
    model = whole_model(work)
    decayed = [[p for n, p in model.named_parameters() if work.lines[n].weight_decay == d] for d in (True, False)]
    wrapped: Any = MeanLoss(model)

    def state() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    def load(found: dict[str, Any]) -> None:
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])

    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=settings.group_timeout_s)),
        load_state_dict=load,
        state_dict=state,
        min_replica_size=1,
        timeout=timedelta(seconds=settings.manager_timeout_s),
        replica_id=f"rank_{rank}",
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        hostname="127.0.0.1",
        lighthouse_addr=(work.folder / "lighthouse").read_text().strip(),
        heartbeat_interval=timedelta(milliseconds=settings.heartbeat_ms),
    )
    wrapped = torchft.DistributedDataParallel(manager, wrapped)
    config = work.optimizer
    optimizer = torchft.Optimizer(
        manager,
        torch.optim.AdamW(
            [{"params": p, "weight_decay": w} for p, w in zip(decayed, (config.weight_decay, 0.0), strict=True)],
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            fused=True,
        ),
    )
    data, own, taken = work.data(), work.batch // size, 0
    while True:
        before = manager.current_step()
        optimizer.zero_grad()
        # Each rank has samples of its own, as torchft's sampler gives them: those of a step that is dropped are gone.
        tokens, targets = (torch.from_numpy(one) for one in data.train_batch((taken * size + rank) * own, own))
        taken += 1
        wrapped(tokens, targets).backward()
        optimizer.step()
        generation, now = manager._quorum_id, manager.current_step()
        if now > before:
            journal.write("step", step=now, size=manager.num_participants(), generation=generation, samples=own)
        else:
            journal.write("dropped", step=before + 1, generation=generation, samples=own)


def whole_model(work: Work) -> nn.Module:
    """With all experts and the same values on every rank."""
    model, lines = work.model(), work.lines
    values = {}
    for name, line in lines.items():
        value = work.initial(name, 0, line.num_units).to(work.dtype)
        values[name] = value[0] if line.kind is LineKind.WHOLE else value
        if line.kind is not LineKind.EXPERTS:
            module, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(module), attribute, nn.Parameter(values[name]))
    for axis, layer in model.moe_layers().items():  # type: ignore[operator]
        w13, w2 = [name for name, line in lines.items() if line.axis == axis]
        units = lines[w13].units_per_expert
        assert units is not None
        layer.experts.replace(expert_slices([(0, lines[w13].num_units)], units), values[w13], values[w2])
    return model


def settings_in(folder: Path) -> TorchftSettings:
    """Those that the job was started with."""
    return TorchftSettings(**json.loads((folder / "settings.json").read_text()))


if __name__ == "__main__":
    if sys.argv[1] == "--lighthouse":
        lighthouse(settings_in(Path(sys.argv[2])), Path(sys.argv[2]) / "lighthouse")
    place = Path(sys.argv[1])
    sys.exit(main(Work.read(place / "work.json"), int(sys.argv[2]), int(sys.argv[3]), settings_in(place)))
