"""Compare the planner's cost model with published training runs, and with the debug model on this machine.

    python scripts/check_cost_model.py published
    python scripts/check_cost_model.py measured [--repeats N]

`published` prints the table of docs/planner-cost-model.md. `measured` calibrates this machine at one size and
predicts forward and backward of the model at that and other sizes; nothing else should run meanwhile.
"""

import argparse
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from nep.planning.cluster import Cluster
from nep.planning.cost.hardware import HardwareProfile
from nep.planning.cost.profiles import published_profile
from nep.planning.cost.step_time import StepTime, step_time
from nep.planning.cost.workload import Workload
from nep.planning.planner import plan_from_scratch
from nep.planning.shapes import ModelShape, parameter_lines, preset


@dataclass(frozen=True, kw_only=True)
class Run:
    """A training run that somebody published.

    Attributes:
        what: model and machine.
        source: where its time is from.
        step_s: published seconds of a step, or those that follow from tokens per second or from operations.
        without: what the model does not know of the run.
        left_out: parts of the prediction that do not belong to it.
        slots_per_rack: of scale-up domains that are racks; None: nodes.
    """

    what: str
    source: str
    step_s: float
    without: str
    shape: ModelShape
    hardware: str
    num_slots: int
    slots_per_node: int
    num_replicas: int
    global_batch_size: int
    micro_batch_size: int
    seq_len: int = 4096
    recompute: bool = False
    overlap: bool = False
    left_out: tuple[str, ...] = ()
    slots_per_rack: int | None = None

    @property
    def cluster(self) -> Cluster:
        """Replicas each in a rack of its own where there are racks: what a rack has more stands idle."""
        if self.slots_per_rack is None:
            return Cluster.uniform(self.num_slots, self.slots_per_node)
        used = self.num_slots // self.num_replicas
        everything = Cluster.uniform(self.slots_per_rack * self.num_replicas, self.slots_per_node)
        idle = [slot.index for slot in everything.slots if slot.index % self.slots_per_rack >= used]
        return everything.with_health(idle, "idle")


def _sparse(**sizes: object) -> ModelShape:
    common: dict[str, object] = {
        "rope_theta": 1e6, "norm_eps": 1e-6, "sliding_window": None, "tied_embeddings": False, "max_seq_len": 8192,
    }  # fmt: skip
    return ModelShape(**(common | sizes))  # type: ignore[arg-type]


# huggingface.co/Qwen/Qwen3-30B-A3B
_QWEN = _sparse(
    name="Qwen3-30B-A3B", num_layers=48, hidden_size=2048, ffn_hidden_size=768, num_experts=128, top_k=8,
    num_heads=32, num_kv_heads=4, head_dim=128, vocab_size=151_936, neuron_block=128,
)  # fmt: skip


def _gpt_oss(name: str, num_layers: int, num_experts: int) -> ModelShape:
    """huggingface.co/openai/gpt-oss-20b and -120b."""
    return _sparse(
        name=name, num_layers=num_layers, hidden_size=2880, ffn_hidden_size=2880, num_experts=num_experts, top_k=4,
        num_heads=64, num_kv_heads=8, head_dim=64, vocab_size=201_088, neuron_block=96,
    )  # fmt: skip


# huggingface.co/deepseek-ai/DeepSeek-V3
_DEEPSEEK = _sparse(
    name="DeepSeek-V3", num_layers=61, hidden_size=7168, ffn_hidden_size=2048, num_experts=256, top_k=8,
    num_heads=128, num_kv_heads=1, head_dim=192, vocab_size=129_280, neuron_block=128, num_shared_experts=1,
    shared_ffn_hidden_size=2048, num_dense_layers=3, dense_ffn_hidden_size=18_432, kv_latent_size=512,
    query_latent_size=1536, rope_head_dim=64, value_head_dim=128,
)  # fmt: skip


def _operations(shape: ModelShape, seq_len: int) -> float:
    """Operations of one token as Megatron counts them: attention over the whole sequence, not the causal half."""
    d, query = shape.hidden_size, shape.num_heads * shape.head_dim
    attention = 2 * d * query + 2 * d * shape.num_kv_heads * shape.head_dim + 2 * seq_len * query
    layer = attention + 3 * shape.top_k * d * shape.ffn_hidden_size
    return 6.0 * (shape.num_layers * layer + d * shape.vocab_size)


_AUTOMODEL = "NeMo AutoModel, docs/performance-summary.mdx"
_BRIDGE = "Megatron Bridge, docs/performance-summary-archive.md"
_SYNC = ("grad_sync", "parameter_return")
_PIPELINE = "pipeline, its bubbles and its smaller gradient traffic (ours left out)"


def published_runs() -> list[Run]:
    """Runs in bf16 with balanced routing, as their authors forced it."""
    mixtral, large = preset("mixtral-8x7b"), preset("mixtral-8x22b")
    small_oss, oss = _gpt_oss("gpt-oss-20b", 24, 32), _gpt_oss("gpt-oss-120b", 36, 128)
    return [
        Run(
            what="Qwen3-30B-A3B, 8 H100, EP8, recomputation", source=f"{_AUTOMODEL}: 21.773 s", step_s=21.773,
            without="dispatch in recomputation, FSDP's gathering of weights", shape=_QWEN, hardware="h100-sxm",
            num_slots=8, slots_per_node=8, num_replicas=1, global_batch_size=512, micro_batch_size=4, recompute=True,
        ),
        Run(
            what="gpt-oss-20b, 8 H100, EP8", source=f"{_AUTOMODEL}: 10.04 s", step_s=10.04,
            without="FlexAttention, biases, sinks; windows in half of the layers; FSDP", shape=small_oss,
            hardware="h100-sxm", num_slots=8, slots_per_node=8, num_replicas=1, global_batch_size=256,
            micro_batch_size=2,
        ),
        Run(
            what="gpt-oss-120b, 64 H100, EP64", source=f"{_AUTOMODEL}: 4.30 s", step_s=4.30,
            without="the same; a dispatcher that sends a row once per node, not once per GPU", shape=oss,
            hardware="h100-sxm", num_slots=64, slots_per_node=8, num_replicas=1, global_batch_size=512,
            micro_batch_size=1,
        ),
        Run(
            what="gpt-oss-120b, 64 GB200, EP64", source=f"{_BRIDGE}, 26.04.01: 16,640 tokens/s and GPU",
            step_s=1280 * 4096 / 64 / 16_640, without="biases, sinks, windows; time on the host", shape=oss,
            hardware="gb200-nvl72", num_slots=64, slots_per_node=4, num_replicas=1, global_batch_size=1280,
            micro_batch_size=4,
        ),
        Run(
            what="gpt-oss-120b, 64 B200, EP8", source=f"{_BRIDGE}, 26.04.01: 13,568 tokens/s and GPU",
            step_s=1280 * 4096 / 64 / 13_568, without="biases, sinks, windows; time on the host", shape=oss,
            hardware="b200-sxm", num_slots=64, slots_per_node=8, num_replicas=8, global_batch_size=1280,
            micro_batch_size=4, overlap=True,
        ),
        Run(
            what="Mixtral 8x7B, 64 H100, EP8 PP4", source="Megatron-LM, moe/README.md: 468 TFLOP/s",
            step_s=256 * 4096 / 64 * _operations(mixtral, 4096) / 468e12, without=_PIPELINE, shape=mixtral,
            hardware="h100-sxm", num_slots=64, slots_per_node=8, num_replicas=8, global_batch_size=256,
            micro_batch_size=1, left_out=_SYNC,
        ),
        Run(
            what="Mixtral 8x22B, 128 H100, TP2 EP8 PP8", source="arXiv 2504.14960, table 2: 487.7 TFLOP/s",
            step_s=256 * 4096 / 128 * _operations(large, 4096) / 487.7e12,
            without=f"{_PIPELINE}; collectives of TP2; routing is capped", shape=large, hardware="h100-sxm",
            num_slots=128, slots_per_node=8, num_replicas=16, global_batch_size=256, micro_batch_size=1,
            left_out=_SYNC,
        ),
        Run(
            what="DeepSeek-V3, 256 GB200, EP64 PP4", source=f"{_BRIDGE}, 25.11: 3,139 tokens/s and GPU",
            step_s=4096 * 4096 / 256 / 3139, without=f"{_PIPELINE}; recomputation of parts", shape=_DEEPSEEK,
            hardware="gb200-nvl72", num_slots=256, slots_per_node=4, num_replicas=4, global_batch_size=4096,
            micro_batch_size=1, left_out=_SYNC, slots_per_rack=72,
        ),
    ]  # fmt: skip


def _plan_and_time(
    shape: ModelShape, workload: Workload, cluster: Cluster, hardware: HardwareProfile, num_replicas: int
) -> StepTime:
    plan = plan_from_scratch(
        cluster,
        parameter_lines(shape),
        num_replicas=num_replicas,
        global_batch_size=workload.global_batch_size,
        redundancy="none",
    )
    return step_time(plan, shape=shape, workload=workload, cluster=cluster, hardware=hardware)


def predicted(run: Run) -> StepTime:
    """What the cost model says of a published run."""
    workload = Workload(
        global_batch_size=run.global_batch_size,
        micro_batch_size=run.micro_batch_size,
        seq_len=run.seq_len,
        recompute=run.recompute,
        overlap=run.overlap,
    )
    return _plan_and_time(run.shape, workload, run.cluster, published_profile(run.hardware), run.num_replicas)


def published_table() -> str:
    """Predicted against published, in Markdown."""
    rows = [
        "| run | published s | predicted s | ratio | experts / attention / dense / dispatch / rest | left out |",
        "| --- | ---: | ---: | ---: | --- | --- |",
    ]
    for run in published_runs():
        time_of = predicted(run)
        parts = {part: value for part, value in time_of.parts.items() if part not in run.left_out}
        total = sum(parts.values())
        main = [parts.pop(part) for part in ("expert_gemm", "attention", "dense", "dispatch")]
        shown = " / ".join(f"{value:.2f}" for value in (*main, sum(parts.values())))
        rows.append(
            f"| {run.what} ({run.source}) | {run.step_s:.2f} | {total:.2f} | {total / run.step_s:.2f} | {shown} | "
            f"{run.without} |"
        )
    return "\n".join(rows)


def measured_table(repeats: int) -> str:
    """Forward and backward of the debug model and its relatives, predicted from one calibration."""
    import torch

    from models.mixtral import MixtralModel
    from nep.train.calibrate import calibrate

    torch.set_num_threads(1)
    debug = preset("debug")
    profile = calibrate(debug, tokens=512, seq_len=128, repeats=repeats)
    cases = [
        (debug, 4, 128),
        (debug, 1, 128),
        (debug, 16, 128),
        (debug, 4, 256),
        (replace(debug, num_layers=4), 4, 128),
        (replace(debug, hidden_size=256, ffn_hidden_size=512, num_heads=16, num_kv_heads=8), 4, 128),
    ]
    rows = ["layers  width  sequences  tokens  measured ms  predicted ms  ratio"]
    for shape, batch, seq_len in cases:
        model = MixtralModel(shape, dtype=torch.float32, device="cpu")
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
        seconds = []
        for _ in range(3 + repeats):
            tokens = torch.randint(0, shape.vocab_size, (batch, seq_len))
            start = time.process_time()
            logits = model(tokens).logits_btv
            torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten(), reduction="sum").backward()
            seconds.append(time.process_time() - start)
        workload = Workload(global_batch_size=batch, micro_batch_size=batch, seq_len=seq_len, parameter_bytes=4)
        found = _plan_and_time(shape, workload, Cluster.uniform(1, 1), profile, 1)
        guess = found["expert_gemm"] + found["attention"] + found["dense"]
        best = min(seconds[3:])
        rows.append(
            f"{shape.num_layers:6d} {shape.hidden_size:6d} {batch:10d} {seq_len:7d} {best * 1e3:12.1f} "
            f"{guess * 1e3:13.1f} {guess / best:6.2f}"
        )
    return "\n".join(rows)


def main(arguments: list[str]) -> int:
    """Prints one of the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("published", "measured"))
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args(arguments)
    print(published_table() if options.what == "published" else measured_table(options.repeats))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
