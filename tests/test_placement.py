"""Plans without GPUs: the equation, who lives where, memory by device, what is refused, what ``auto`` picks."""

from __future__ import annotations

import copy
import json
import sys
from functools import cache, partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import yaml

from nexus_lightning.config import ConfigError, NexusConfig, compose_config, validate
from nexus_lightning.memory import estimate
from nexus_lightning.objectives.grpo import GRPO
from nexus_lightning.placement.plan import Devices, common_devices, rank_problems, resolve, sharding_problems

ROOT = Path(__file__).resolve().parent.parent
GB = 10**9
HEAD = {"weights_bytes": GB, "gradient_bytes": GB, "adam_bytes": 2 * GB, "served_bytes": 2 * GB, "ema_bytes": 0}
#: 10 G parameters in bfloat16, a tenth of them in each unit and in none; two heads of 1 GB.
FIGURES = {
    "backbone": {
        "name": "Large",
        "parameters": 10 * GB,
        "bytes": 20 * GB,
        "buffer_bytes": 0,
        "unit_parameters": GB,
        "root_parameters": GB,
    },
    "tenants": {"toy": HEAD, "toy_sft": HEAD},
}


def gpus(world: int, per_node: int | None = None, memory_gb: int = 80, there_are: int | None = None) -> Devices:
    per_node = per_node or world
    return Devices("cuda", world, per_node, memory_gb * GB, there_are or per_node, 512 * GB)


def cpus(world: int, host_gb: int = 64) -> Devices:
    return Devices("cpu", world, world, host_gb * GB, 1, host_gb * GB)


@cache
def composed(*overrides: str) -> NexusConfig:
    return compose_config(ROOT / "conf", ["+tenants=[toy,toy_sft]", *overrides])


@pytest.fixture
def config():
    """``config(*overrides)`` of two tenants. Composing takes most of a second: once per placement, then values."""

    def build(*overrides: str) -> NexusConfig:
        groups = [o for o in overrides if o.startswith("placement=")]
        result = copy.deepcopy(composed(*groups))
        for override in overrides:
            key, value = override.lstrip("+").split("=", 1)
            if override not in groups:
                *path, last = key.split(".")
                node: Any = result
                for part in path:
                    node = node[part] if isinstance(node, dict) else getattr(node, part)
                put = node.__setitem__ if isinstance(node, dict) else partial(setattr, node)
                put(last, yaml.safe_load(value))
        return result

    return build


def refusal(config, devices, figures=FIGURES) -> str:
    with pytest.raises(ConfigError) as error:
        resolve(config, devices, figures)
    return str(error.value)


@pytest.mark.parametrize("name", ["auto", "single", "ddp", "fsdp2", "split"])
def test_every_shipped_placement_composes_and_is_valid(config, name):
    placed = config(f"placement={name}")
    validate(placed)
    devices = gpus(1, there_are=2) if name in ("single", "split") else gpus(2)
    plan = resolve(placed, devices, FIGURES)
    assert plan.strategy == {"auto": "ddp", "split": "single"}.get(name, name)
    assert plan.replicate * plan.shard == plan.world_size


def test_unknown_and_impossible_values_are_one_message(config):
    placed = config("placement.backbone.shard=0", "placement.environments.toy=[0,0]", "placement.inference.device=tpu")
    placed.placement.environments["ghost"] = [0]
    placed.placement.strategy, placed.placement.precision = "zero3", "16-mixed"
    placed.placement.backbone.param_dtype = "fp8"
    with pytest.raises(ConfigError) as error:
        validate(placed)
    for part in (
        "placement.strategy=zero3: choose one of auto, single, ddp, fsdp2",
        "placement.precision=16-mixed",
        "placement.backbone.shard=0: must be at least 1",
        "placement.backbone.param_dtype=fp8",
        "placement.inference.device=tpu",
        "placement.environments.toy=[0, 0]: give different ranks",
        "placement.environments.ghost=[0]: no such tenant",
    ):
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("overrides", "devices", "message"),
    [
        (["placement=single"], gpus(2), "this launch has 2 ranks; use placement=auto, ddp or fsdp2"),
        (["placement=ddp", "placement.backbone.shard=2"], gpus(2), "ddp holds the whole backbone on every rank"),
        (
            ["placement=fsdp2", "placement.backbone.shard=3"],
            gpus(4),
            "replicate=1 * shard=3 = 3, but this launch has 4",
        ),
        (
            ["placement=ddp", "placement.backbone.replicate=4"],
            gpus(2),
            "replicate=4 * shard=1 = 4, but this launch has 2",
        ),
        (["placement=fsdp2", "placement.heads.shard=3"], gpus(4), "heads.shard=3: heads are whole, or sharded"),
        (["placement=ddp", "placement.heads.shard=2"], gpus(2), "placement.heads.shard=2"),
        (["placement=ddp", "placement.backbone.cpu_offload=true"], gpus(2), "cpu_offload=True: only fsdp2 reads it"),
        (["placement=ddp", "placement.backbone.param_dtype=bf16"], gpus(2), "param_dtype=bf16: only fsdp2 reads it"),
        ([], gpus(4, there_are=2), "4 ranks on a machine with 2 cuda devices: launch with --nproc-per-node=2"),
        ([], Devices("cuda", 5, 2, GB, 2, GB), "every machine must run equally many"),
        (
            ["placement.environments.toy=[0,2]"],
            gpus(2),
            "environments.toy=[0, 2]: the ranks of this launch are 0 to 1",
        ),
        (["placement=split"], gpus(1), "inference.device=cuda:1: this machine has 1 cuda devices"),
        (["placement.inference.device=cuda:1"], gpus(2), "rank 1 of this machine trains there"),
        (["placement=split"], cpus(1), "inference.device=cuda:1: training runs on cpu"),
        (
            ["tenants.toy.environment.num_envs=7", "placement.environments.toy=[0,1]"],
            gpus(2),
            "num_envs=7: 2 ranks cannot share them equally; use a multiple of 2, or other ranks than",
        ),
        (["placement.max_simulators_per_rank=4"], gpus(2), "max_simulators_per_rank=4: rank 0 would run 5"),
    ],
)
def test_what_cannot_be_is_refused_with_the_fix(config, overrides, devices, message):
    assert message in refusal(config(*overrides), devices)


def test_degrees_follow_from_each_other(config):
    def degrees(world, *overrides):
        plan = resolve(config(*overrides), gpus(world, per_node=min(world, 8)), FIGURES)
        return plan.strategy, plan.replicate, plan.shard

    assert degrees(16, "placement=fsdp2") == ("fsdp2", 1, 16)
    assert degrees(16, "placement=fsdp2", "placement.backbone.shard=8") == ("fsdp2", 2, 8)
    assert degrees(16, "placement=fsdp2", "placement.backbone.replicate=4") == ("fsdp2", 4, 4)
    assert degrees(16, "placement=ddp") == ("ddp", 16, 1)
    assert degrees(1, "placement=fsdp2") == ("fsdp2", 1, 1)
    assert degrees(1, "placement=ddp") == ("ddp", 1, 1)
    assert degrees(4, "placement.backbone.shard=2") == ("fsdp2", 2, 2)  # auto keeps what was given


#: Rollouts and evaluations on a copy in host memory, so that shards save memory on the GPUs.
ELSEWHERE = "placement.inference.device=cpu"
SUPERVISED = ["tenants.toy_sft.eval.episodes=0", "tenants.toy_sft.features.reuse=never"]


def test_auto_holds_the_backbone_whole_while_it_fits_then_shards_over_as_few_ranks_as_fit(config):
    def chosen(devices):
        plan = resolve(config(ELSEWHERE), devices, FIGURES)
        return plan.strategy, plan.shard, plan.reason

    assert chosen(gpus(1))[:2] == ("single", 1)
    # 20 GB of backbone, 2 x (1 + 1 + 2) GB of heads, 1 GB to reduce
    strategy, shard, reason = chosen(gpus(8, memory_gb=33))
    assert (strategy, shard) == ("ddp", 1) and "fit whole into 90% of 33.0 GB" in reason and "20.0 GB" in reason
    # halves: 10 GB of backbone and 6 GB gathered make 25 GB
    strategy, shard, reason = chosen(gpus(8, memory_gb=28))
    assert (strategy, shard) == ("fsdp2", 2) and "do not fit whole" in reason and "2 ranks per copy they do" in reason
    assert chosen(gpus(8, memory_gb=20))[:2] == ("fsdp2", 8)
    strategy, shard, reason = chosen(gpus(8, per_node=2, memory_gb=20))
    assert (strategy, shard) == ("fsdp2", 8) and "no machine has alone" in reason
    strategy, shard, reason = chosen(gpus(8, memory_gb=18))
    assert (strategy, shard) == ("fsdp2", 8) and "needs least" in reason
    assert "shard the heads too (placement.heads.shard=8)" in refusal(config(ELSEWHERE), gpus(8, memory_gb=15))


def test_shards_save_nothing_where_the_backbone_is_also_needed_whole(config):
    """Rollout threads cannot gather shards: auto knows, and the refusal says what to do."""
    plan = resolve(config(), gpus(8, memory_gb=34), FIGURES)
    assert (plan.strategy, plan.devices[0].needed_bytes) == ("ddp", 33 * GB)
    message = refusal(config("placement=fsdp2"), gpus(8, memory_gb=34))
    assert "placement.inference.device=cpu" in message and "inference backbone (20.0 GB) takes most" in message
    supervised = composed(*SUPERVISED, "~tenants.toy", "placement=fsdp2")
    plan = resolve(supervised, gpus(8, memory_gb=34), {**FIGURES, "tenants": {"toy_sft": HEAD}})
    assert "inference backbone" not in plan.devices[0].parts


def test_cpu_ranks_share_the_memory_of_their_machine(config):
    plan = resolve(config(), cpus(2, host_gb=80), FIGURES)
    assert plan.strategy == "ddp" and "that 2 ranks share" in plan.reason
    assert plan.devices[0].needed_bytes == 66 * GB
    assert "machine with 2 ranks needs 66.0 GB and has 40.0 GB" in refusal(config("placement=ddp"), cpus(2, host_gb=40))


def test_memory_of_every_part(config):
    def parts(devices, *overrides):
        plan = resolve(config(*overrides), devices, FIGURES)
        return {d.name: {k: v / GB for k, v in d.parts.items()} for d in plan.devices}

    heads = {"heads": 2, "optimizer": 6, "served heads": 4}
    assert parts(gpus(2), "placement=ddp")["training GPU"] == {"backbone": 20, **heads, "reduction": 1}
    # two units and what is in no unit are gathered: 3 GB of parameters, 2 bytes each
    whole = {**heads, "reduction": 1, "inference backbone": 20}
    assert parts(gpus(4), "placement=fsdp2")["training GPU"] == {"backbone": 5, "gathered": 6, **whole}
    elsewhere = parts(gpus(4), "placement=fsdp2", ELSEWHERE)
    assert elsewhere["training GPU"] == {"backbone": 5, "gathered": 6, "heads": 2, "optimizer": 6, "reduction": 1}
    assert elsewhere["machine (host memory)"] == {"served heads": 16, "inference backbone": 80}
    wide = parts(gpus(4), "placement=fsdp2", "placement.backbone.param_dtype=fp32")
    assert wide["training GPU"]["gathered"] == 12
    kept = parts(gpus(4), "placement=fsdp2", "placement.backbone.reshard_after_forward=false")
    assert kept["training GPU"]["gathered"] == 20
    offloaded = parts(gpus(4), "placement=fsdp2", "placement.backbone.cpu_offload=true")
    assert "backbone" not in offloaded["training GPU"] and offloaded["machine (host memory)"]["backbone"] == 20
    # each rank a half of both heads and of their optimizers, their whole replicas, and one head gathered
    sharded = parts(gpus(2), "placement=fsdp2", "placement.heads.shard=2", ELSEWHERE)["training GPU"]
    assert sharded == {"backbone": 10, "gathered": 6, "heads": 4, "optimizer": 3}
    split = parts(gpus(1, there_are=2), "placement=split")
    assert split["training GPU"] == {"backbone": 20, "heads": 2, "optimizer": 6}
    assert split["inference GPU (cuda:1)"] == {"served heads": 4, "inference backbone": 20}


def test_simulators_live_on_the_ranks_that_were_named(config):
    plan = resolve(config("tenants.toy.environment.num_envs=6"), gpus(2), FIGURES)
    assert plan.environments == {"toy": (0, 1), "toy_sft": (0, 1)}
    assert plan.simulators == {"toy": (3, 3), "toy_sft": (1, 1)}, "rollouts are shared, evaluations run on every rank"
    placed = config("placement.environments.toy=[3,1]", "placement.environments.toy_sft=[0]")
    plan = resolve(placed, gpus(4), FIGURES)
    assert plan.simulators == {"toy": (0, 4, 0, 4), "toy_sft": (1, 0, 0, 0)}
    assert "ranks 1, 3: 4 each" in plan.table() and "rank 0: 1" in plan.table()
    # who is not named is spread evenly over as many ranks as can share equally
    placed = config("tenants.toy.environment.num_envs=4", "tenants.toy_sft.eval.episodes=3")
    plan = resolve(placed, gpus(16, per_node=8), FIGURES)
    assert plan.environments == {"toy": (0, 4, 8, 12), "toy_sft": (0, 5, 10)}
    assert resolve(config("tenants.toy.environment.num_envs=7"), gpus(2), FIGURES).environments["toy"] == (0,)
    settled = plan.settle(placed)
    assert settled.placement.environments["toy"] == [0, 4, 8, 12] and placed.placement.environments == {}
    assert resolve(settled, gpus(16, per_node=8), FIGURES).signature == plan.signature
    without = config("tenants.toy_sft.eval.episodes=0")
    assert "toy_sft" not in resolve(without, gpus(4), FIGURES).simulators


def test_groups_stay_on_one_rank(config):
    def grouped(*overrides: str) -> NexusConfig:
        result = config(*overrides)
        result.tenants["toy"].algorithm = GRPO.configure(chunks_per_job=12, group_size=4)
        return result

    assert resolve(grouped(), gpus(2), FIGURES).simulators["toy"] == (4, 4)
    assert resolve(grouped(), gpus(4), FIGURES).environments["toy"] == (0, 2)
    named = "placement.environments.toy=[0,1,2,3]"
    assert "in groups of 4; use a multiple of 16" in refusal(grouped(named), gpus(4))


def test_uneven_batches_are_padded(config):
    plan = resolve(config("tenants.toy_sft.dataset.batch_size=30"), gpus(4), FIGURES)
    assert plan.batches["toy_sft"] == "30 = 4 x 8 - 2 of padding"


def test_plans_are_equal_on_all_ranks_whatever_their_memory(config):
    placed = config("placement=ddp")
    a, b = (resolve(placed, gpus(2, memory_gb=memory), FIGURES) for memory in (80, 96))
    assert a.devices != b.devices and a.signature == b.signature
    assert a.signature != resolve(config("placement=fsdp2"), gpus(2), FIGURES).signature
    json.dumps(a.to_dict())


def test_a_launch_has_what_its_smallest_machine_has():
    devices = common_devices([gpus(2, memory_gb=80), gpus(2, memory_gb=40)])
    assert devices == gpus(2, memory_gb=40)
    with pytest.raises(ConfigError, match="rank 0 cuda, rank 1 cpu"):
        common_devices([gpus(2), cpus(2)])


def test_one_rank_needs_no_estimate_and_torchruns_variables_count(config, monkeypatch):
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    plan = resolve(config("placement.accelerator=cpu"))
    assert (plan.strategy, plan.world_size, plan.devices) == ("single", 1, ())
    assert plan.reason == "auto: one rank"
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    here = Devices.here("cpu")
    assert (here.world_size, here.num_nodes, here.host_bytes) == (4, 2, psutil.virtual_memory().total)
    with pytest.raises(ConfigError, match=r"placement\.accelerator=tpu: there is none"):
        Devices.here("tpu")


def test_the_estimate_gives_what_a_plan_needs(compose):
    from models.backbones.qwen_vl import Qwen3VL

    config = compose("+tenants=[toy_sft]", "backbone=qwen3_vl_tiny", "tenants.toy_sft.head.ema_decay=0.99")
    backbone = Qwen3VL.on_meta(pretrained="tiny", dtype="fp32")
    held = estimate(config, backbone)["backbone"]
    layer = sum(p.numel() for p in backbone.decoder_layers()[0].parameters())
    assert held["unit_parameters"] >= layer and 0 < held["root_parameters"] < held["parameters"]
    plan = resolve(config, gpus(2), estimate(config, backbone))
    (training, host) = plan.devices
    tenant = estimate(config, backbone)["tenants"]["toy_sft"]
    counted = training.parts["heads"] + training.parts["optimizer"] + training.parts["served heads"]
    assert counted == tenant["total_bytes"] and host.budget_bytes > 0


@pytest.fixture
def script(monkeypatch):
    """``scripts/plan.py`` with arguments, in this process."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import plan as plan_script

    def run(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["plan.py", *arguments])
        return plan_script.main()

    return run


def test_the_script_plans_a_cluster_that_is_not_there(script, tmp_path, capsys):
    out, png = tmp_path / "plan.json", tmp_path / "plan.png"
    cluster = ["num_nodes=2", "gpus_per_node=8", "gpu_memory_gb=80", f"json={out}", f"png={png}"]
    overrides = ["placement=fsdp2", ELSEWHERE, "backbone=qwen3_vl_4b", "+tenants=[libero,maniskill]"]
    assert script(*overrides, *cluster) == 0
    plan = json.loads(out.read_text())
    assert (plan["strategy"], plan["world_size"], plan["shard"]) == ("fsdp2", 16, 16)
    training = plan["devices"][0]
    assert training["count"] == 16 and 0 < training["needed_bytes"] < 3 * GB, "8.9 GB of weights over 16 GPUs"
    printed = capsys.readouterr().out
    assert "16 x training GPU" in printed and "libero" in printed and png.stat().st_size > 10_000


def test_the_script_refuses_with_two(script, capsys):
    assert script("placement=single", "ranks_per_node=2", "+tenants=[toy]", "backbone=smolvlm2_tiny") == 2
    assert "this launch has 2 ranks" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="num_nodes"):
        script("num_nodes=0")


def test_what_a_run_cannot_do_yet_is_refused_with_the_fix():
    config = composed("tenants.toy.algorithm.proximal=true", "placement=fsdp2", "placement.heads.shard=2")
    plan = resolve(config, gpus(2), FIGURES)
    assert rank_problems(config, plan) == []
    assert [p.split(": ")[2] for p in sharding_problems(config, plan)] == [
        "algorithm.proximal runs the head outside the steps; set it to false"
    ]


def test_a_head_that_continues_the_backbone_is_served_where_it_trains():
    config = composed("placement=split", "placement.inference.device=cpu")
    plan = resolve(config, cpus(1), FIGURES)
    assert rank_problems(config, plan) == []
    config = copy.deepcopy(config)
    config.tenants["toy"].head = {"_target_": "models.heads.adapter.AdapterHead", "lr": 1e-3}
    assert "continues the backbone" in rank_problems(config, plan)[0]


def test_serving_on_a_device_of_its_own(compose, monkeypatch):
    """A whole second copy of the backbone runs rollouts and evaluations; what is learnt stays bit for bit the same."""
    from fakes import FakeBackbone

    from nexus_lightning.checkpoint import read_payload, resolve_payload
    from nexus_lightning.run.runtime import Runtime
    from nexus_lightning.trainer import train

    runtimes, init = [], Runtime.__init__

    def remember(self, *args, **kwargs):
        init(self, *args, **kwargs)
        runtimes.append(self)

    monkeypatch.setattr(Runtime, "__init__", remember)
    monkeypatch.setattr("nexus_lightning.trainer.write_report", lambda run_dir: None)
    runs, backbones = [], [FakeBackbone(), FakeBackbone()]
    for backbone, overrides in zip(backbones, ([], ["placement=split", "placement.inference.device=cpu"]), strict=True):
        config = compose("+tenants=[toy]", "trainer.enable_progress_bar=false", *overrides)
        config.backbone = {"_target_": "fakes.FakeBackbone"}
        config.tenants["toy"].eval.episodes, config.tenants["toy"].eval.video = 3, False
        config.tenants["toy"].target_jobs = config.tenants["toy"].eval.every_n_jobs = 2
        config.tenants["toy"].max_in_flight = 1
        runs.append(train(config, backbone))
    one, two = (read_payload(resolve_payload(Path(run["run_dir"]) / "tenants" / "toy")) for run in runs)
    assert all(torch.equal(value, two.tensors[name]) for name, value in one.tensors.items())
    results = [run["tenants"]["toy"]["eval"] for run in runs]
    assert results[0] == results[1] and results[0]["n"] == 3
    shared, split = runtimes
    served = split.served.backbone
    assert shared.served.backbone is shared.backbone and served is not split.backbone
    assert served.fingerprint == split.backbone.fingerprint and runs[1]["backbone_unchanged"] is True
    assert not {t.data_ptr() for t in served.parameters()} & {t.data_ptr() for t in split.backbone.parameters()}
    alone = backbones[0].calls  # of rollouts and evaluations, and before them of a probe
    assert served.calls == alone and backbones[1].calls < alone / 4, "the actor's reads stored features"


def test_a_copy_that_serves_is_counted(config):
    plan = resolve(config("placement=split", "placement.inference.device=cpu"), cpus(1), FIGURES)
    assert plan.devices[0].parts["backbone"] == plan.devices[0].parts["inference backbone"] == 20 * GB
    shared = resolve(config("placement=single"), cpus(1), FIGURES)
    assert plan.devices[0].needed_bytes == shared.devices[0].needed_bytes + 20 * GB


def test_the_default_backbone_can_be_sharded(tmp_path):
    """Its convolutions are channels-last; one rank is enough to see that FSDP2 takes them and features stay."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from models.backbones.effnet_minilm import EffNetMiniLM
    from nexus_lightning.checks import random_observation
    from nexus_lightning.config import BackbonePlacement
    from nexus_lightning.placement.sharding import shard_backbone
    from nexus_lightning.schema import TenantSchema

    schema = TenantSchema(state_dim=4, action_dim=3, chunk=3, execute=2, cameras=("front",), image_size=64)
    observation, texts = random_observation(schema, 3), ["go", "go left", "go"]
    backbone = EffNetMiniLM()
    before = backbone(observation, texts, schema)
    backbone.clear_text_cache()
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        shard_backbone(backbone, init_device_mesh("cpu", (1,)), BackbonePlacement())
        after = backbone(observation, texts, schema)
        again = backbone(observation, texts, schema)
    finally:
        dist.destroy_process_group()
    for name, tokens in before.tokens.items():
        torch.testing.assert_close(after.tokens[name], tokens, rtol=1e-4, atol=1e-4)
        assert torch.equal(after.tokens[name], again.tokens[name])
