"""How the jobs that are measured are started, and what becomes of a rank that was killed."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from nep.fault_tolerance import processes
from nep.testing.jobs import REPOSITORY
from nep.testing.recovery_bench.settings import TorchftSettings
from nep.testing.recovery_bench.work import TEXT, Work

_HERE = Path(__file__).resolve().parent
_GRACE_S = 5.0
_LIGHTHOUSE_S = 30.0


@dataclass(kw_only=True)
class MeasuredJob:
    """Processes that train. One thread each.

    Attributes:
        work: what they train.
        num_ranks: how many train.
        kills: how often one of them will be killed.
    """

    work: Work
    num_ranks: int
    kills: int
    _log: IO[bytes] | None = field(default=None, init=False)
    _launched: list[subprocess.Popen[bytes]] = field(default_factory=list, init=False)

    def start(self) -> None:
        """Start all of them."""
        self.work.write()
        self._log = (self.work.folder / "output.txt").open("ab")
        self._start()

    def _start(self) -> None:
        raise NotImplementedError

    def replace(self, rank: int) -> None:
        """A rank was killed; most launchers see for themselves."""

    def stop(self) -> None:
        """End everything that was started. The calling process must be a subreaper."""
        for process in self._launched:
            processes.send_signal(process.pid, 15)
        deadline = time.monotonic() + _GRACE_S
        while time.monotonic() < deadline and any(process.poll() is None for process in self._launched):
            time.sleep(0.05)
        processes.end_descendants(_GRACE_S)
        for process in self._launched:
            process.poll()
        if self._log is not None:
            self._log.close()

    @property
    def ended(self) -> bool:
        """Whether the launcher has given up."""
        return self._launched[0].poll() is not None

    def tail(self) -> str:
        """The last lines that the job printed."""
        lines = (self.work.folder / "output.txt").read_text(errors="replace").splitlines()
        return "\n".join(lines[-15:])

    def _launch(self, command: list[str], **environment: str) -> None:
        common = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY), **environment}
        process = subprocess.Popen(
            command,
            cwd=REPOSITORY,
            env={**os.environ, **common},
            stdout=self._log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
        )
        self._launched.append(process)

    def _torchrun(self, *options: str) -> list[str]:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        return [*launcher, "--nproc-per-node", str(self.num_ranks), *options]


@dataclass(kw_only=True)
class NepJob(MeasuredJob):
    """`scripts/train.py` under torchrun; supervisors start killed trainers anew.

    Attributes:
        replicas: copies of the model; each is spread over its share of the ranks.
    """

    replicas: int

    def _start(self) -> None:
        work = self.work
        train = ["--model", work.preset, "--steps", str(work.steps), "--seed", str(work.seed), "--data", str(TEXT)]
        train += ["--global-batch-size", str(work.batch), "--seq-len", str(work.seq_len), "--moe-backend", "loop"]
        train += ["--micro-batch-size", str(work.batch)]  # each rank its whole share at once, as the peers do
        train += [
            "--respawn",
            str(self.kills + 1),
            "--run-dir",
            str(work.folder / "runs"),
            "--replicas",
            str(self.replicas),
        ]
        self._launch([*self._torchrun(), str(_HERE / "nep_worker.py"), str(work.folder), *train])


@dataclass(kw_only=True)
class RestartJob(MeasuredJob):
    """A plain job under torchrun, which starts all ranks anew; they go on from a checkpoint."""

    def _start(self) -> None:
        command = self._torchrun("--max-restarts", str(self.kills + 1))
        # Without it the ranks often never meet again: the agent's store is used again without a prefix per attempt.
        self._launch(
            [*command, str(_HERE / "restart_worker.py"), str(self.work.folder)], TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1"
        )


@dataclass(kw_only=True)
class TorchftJob(MeasuredJob):
    """torchft with one replica group for each rank. A killed rank is replaced at once, sooner than a launcher would.

    Attributes:
        python: of an environment with torchft.
        settings: its time-outs.
    """

    python: Path
    settings: TorchftSettings

    def _start(self) -> None:
        folder = self.work.folder
        (folder / "settings.json").write_text(json.dumps(dataclasses.asdict(self.settings)))
        self._launch([*self._worker(), "--lighthouse", str(folder)])
        deadline = time.monotonic() + _LIGHTHOUSE_S
        while not (folder / "lighthouse").exists():
            if self.ended or time.monotonic() > deadline:
                raise RuntimeError(f"torchft's lighthouse has not come up:\n{self.tail()}")
            time.sleep(0.05)
        for rank in range(self.num_ranks):
            self.replace(rank)

    def replace(self, rank: int) -> None:
        """Start a process that is this rank."""
        self._launch([*self._worker(), str(self.work.folder), str(rank), str(self.num_ranks)])

    def _worker(self) -> list[str]:
        return [str(self.python), str(_HERE / "torchft_worker.py")]
