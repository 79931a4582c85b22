"""Composition of the real conf/ and whole-config validation."""

from __future__ import annotations

import math
import pickle
import re
import shutil
from dataclasses import asdict, replace

import pytest
import yaml
from conftest import ROOT
from example_head import LinearChunkHead
from hydra.errors import ConfigCompositionException, HydraException

from nexus_lightning.bounds import Bounds
from nexus_lightning.config import (
    ConfigError,
    NexusConfig,
    compose_config,
    composition_error,
    saved_tenant,
    split_head,
    typed_algorithm,
    validate,
)
from nexus_lightning.objectives import shipped
from nexus_lightning.objectives.awr import AWR
from nexus_lightning.objectives.grpo import GRPO
from nexus_lightning.objectives.iql import IQL
from nexus_lightning.objectives.ppo import PPO
from nexus_lightning.objectives.reinforce import Reinforce
from nexus_lightning.objectives.sft import SFT


def problems(config: NexusConfig) -> str:
    with pytest.raises(ConfigError) as error:
        validate(config)
    return str(error.value)


@pytest.mark.parametrize(
    "overrides",
    [
        ["+tenants=[toy,toy_sft]"],
        ["tenants=[toy,toy_sft]"],
        ["tenants.toy.head.lr=0.01", "+tenants=[toy,toy_sft]"],  # order does not matter
    ],
)
def test_tenants_are_chosen_on_the_command_line(compose, overrides):
    config = compose(*overrides)
    assert list(config.tenants) == ["toy", "toy_sft"]
    assert config.tenants["toy"].task == "rl" and config.tenants["toy_sft"].task == "sft"
    validate(config)


def test_overrides_reach_the_tenant(compose):
    config = compose("+tenants=[libero]", "tenants.libero.head.lr=1e-4")
    assert config.tenants["libero"].head["lr"] == 1e-4


def test_an_experiment_sets_tenants(compose):
    config = compose("experiment=two_toys")
    assert list(config.tenants) == ["toy_a", "toy_b"]
    assert config.tenants["toy_a"].schema == config.tenants["toy_b"].schema
    assert config.tenants["toy_b"].head["lr"] == 1e-3
    validate(config)


@pytest.mark.parametrize("name", sorted(p.stem for p in (ROOT / "conf" / "experiment").glob("*.yaml")))
def test_every_shipped_experiment_is_valid(compose, name):
    config = compose(f"experiment={name}")
    validate(config)
    assert config.tenants


def test_a_second_copy_under_another_name(compose):
    config = compose("+tenants=[toy]", "+tenant@tenants.toy2=toy", "tenants.toy2.head.lr=5e-4")
    assert config.tenants["toy2"].head["lr"] == 5e-4 != config.tenants["toy"].head["lr"]
    validate(config)


def test_every_shipped_tenant_is_valid(compose):
    config = compose("+tenants=[libero,maniskill,maniskill_sft,toy,toy_sft]")
    validate(config)
    assert config.tenants["libero"].schema.privileged, "the LIBERO quickstart tenant reads privileged object poses"
    assert config.tenants["maniskill"].schema.privileged == ["obj_pose"]
    assert not config.tenants["maniskill_sft"].schema.privileged


def test_a_head_by_name(compose):
    config = compose("+tenants=[toy_sft]", "tenants.toy_sft.head=flow_matching")
    assert split_head(config.tenants["toy_sft"].head)[0] == "models.heads.flow_matching.FlowMatchingHead"
    assert "num_keypoints" not in config.tenants["toy_sft"].head, "nothing of the tenant's own head is left"
    config = compose("+tenants=[toy_sft]", "tenants.toy_sft.head.size=S", "tenants.toy_sft.head=flow_matching")
    assert config.tenants["toy_sft"].head["size"] == "S" and config.tenants["toy_sft"].head["lr"] == 5e-4
    with pytest.raises(ConfigError, match=r"tenants\.toy_sft\.head=transformer.*choose one of.*flow_matching.*mlp"):
        compose("+tenants=[toy_sft]", "tenants.toy_sft.head=transformer")


def test_what_is_set_of_a_head_reaches_the_one_that_takes_its_place(compose):
    """The command line over an experiment that gives a tenant another head, and a sweeper over a head by name."""
    config = compose("experiment=toy_rl", "tenants.toy_flow.head.lr=2e-4", "+tenants.toy_flow.head.num_steps=4")
    options = config.tenants["toy_flow"].head
    assert (options["lr"], options["num_steps"], options["warmup_steps"]) == (2e-4, 4, 0)
    assert "hidden_dim" not in options, "a key of the head that went"
    swept = ["++tenants.toy.head._new_.name=flow_matching", "tenants.toy.head.lr=0.002"]
    options = compose("+tenants=[toy]", *swept).tenants["toy"].head
    assert options["_target_"].endswith("FlowMatchingHead") and options["lr"] == 0.002


def test_unknown_keys_and_wrong_types_fail_with_the_full_key(compose):
    with pytest.raises(ConfigCompositionException, match="taks"):
        compose("+tenants=[toy]", "tenants.toy.taks=sft")
    with pytest.raises(ConfigCompositionException, match="state_dim"):
        compose("+tenants=[toy]", "tenants.toy.schema.state_dim=four")


def test_a_key_that_nothing_reads_is_an_error_wherever_a_plus_puts_it(compose):
    """All of them at once, each with its value and the nearest keys that there are, and what else is wrong."""
    unknown = {
        "tenants.toy.algorithm.clip_ratio=0.3": "tenants.toy.algorithm has no such key; did you mean clip_epsilon?",
        "tenants.toy.eval.n_episodes=3": "did you mean episodes?",
        "tenants.toy.schema.normalisation='none'": "tenants.toy.schema has no such key; did you mean",
        "tenants.toy.init_from.pth='x'": "did you mean path?",
        "tenants.toy.environment.num_workers=3": "did you mean num_envs?",
        "tenants.toy_sft.dataset.record.episode=3": "did you mean episodes?",
        "tenants.toy_sft.dataset.conventions.rot='none'": "did you mean rotation?",
        "tenants.toy_sft.tsk='rl'": "did you mean task?",
        "queues.training.size=9": "valid keys: max_gb_per_tenant, lease_deadline_s, journal",
        "learning_rate=3": "the configuration has no such key; valid keys: tenants, backbone,",
        "tenants.toy.head.lernrate=3": "ChunkMLPHead has no such key",  # validate() finds these
        "backbone.blnd=True": "did you mean blind?",
        "tenants.toy.environment.simulator.horizn=3": "ToySimulator has no such key; did you mean horizon?",
    }
    with pytest.raises(ConfigError) as error:
        compose("+tenants=[toy,toy_sft]", *(f"+{o}" for o in unknown), "++placement.precison=64-true")
    lines = error.value.problems
    for start, rest in {**unknown, "placement.precison='64-true'": "did you mean precision?"}.items():
        assert any(line.startswith(f"{start}: ") and rest in line for line in lines), (start, lines)
    assert len(lines) == len(unknown) + 1


def test_an_unknown_key_of_a_recipe_an_inner_head_or_a_wrong_type_is_listed_with_the_rest(compose):
    config = compose("+tenants=[maniskill,toy_sft]")
    recipe = config.tenants["maniskill"].init_from.recipe
    recipe["hed"], recipe["eval"]["episode"] = {}, 3
    config.tenants["toy_sft"].head = {
        "_target_": "models.heads.adapter.AdapterHead",
        "lr": 1e-3,
        "inner": {"_target_": "models.heads.mlp.ChunkMLPHead", "hidden": 3},
    }
    text = problems(config)
    assert "tenants.maniskill.init_from.recipe.hed={}" in text and "did you mean head" in text
    assert "tenants.maniskill.init_from.recipe.eval.episode=3" in text and "did you mean episodes" in text
    assert "tenants.toy_sft.head.inner.hidden=3: ChunkMLPHead has no such key; did you mean hidden_dim?" in text
    recipe = {k: v for k, v in recipe.items() if k != "hed"} | {"eval": {}, "target_jobs": "many"}
    config.tenants["maniskill"].init_from.recipe = recipe
    assert "tenants.maniskill.init_from.recipe.target_jobs: Value 'many'" in problems(config)


def test_unknown_keys_of_yaml_files_are_all_told(tmp_path):
    """Hydra ends at the first one."""
    conf = tmp_path / "conf"
    shutil.copytree(ROOT / "conf", conf)
    (conf / "experiment" / "mine.yaml").write_text(
        "# @package _global_\ndefaults:\n  - /tenant@tenants.a: toy_sft\n  - _self_\nsed: 3\n"
        "tenants: {a: {dataset: {augmentation: {view: 3}}, weihgt: 2, max_in_flight: 0}}\n"
    )
    arguments = ["experiment=mine", "tenants.a.head.learning_rate=3", "tenants.a.queue=3"]
    with pytest.raises(ConfigCompositionException) as error:
        compose_config(conf, arguments)
    text = str(composition_error(error.value, conf, arguments))
    for expected in (
        "tenants.a.dataset.augmentation.view=3: tenants.a.dataset.augmentation has no such key; did you mean views?",
        "tenants.a.weihgt=2: tenants.a has no such key; did you mean weight?",
        "  - sed=3: the configuration has no such key; did you mean seed?",
        "tenants.a.queue=3",
        "tenants.a.head.learning_rate=3: ChunkMLPHead has no such key",
        "tenants.a.max_in_flight=0: must be at least 1",
    ):
        assert expected in text, text
    assert asdict(compose_config(ROOT / "conf", ["+tenants=[toy]"])), "the schema is back"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["tenants.toy.algoritm.gamma=1"], "tenants.toy.algoritm={'gamma': 1}: tenants.toy has no such key; did you"),
        (["tenants.tou.weight=1"], "tenants.tou={}: tenants has no such key; did you mean toy?"),
        (["tenants.toy.dataset.batch_size=1"], "tenants.toy.dataset.repo_id: a value is required"),
        (["tenants.toy.target_jobs=many"], "tenants.toy.target_jobs: Value 'many' of type 'str' could not be conv"),
        (["backbone=tinny"], "backbone=tinny: no such backbone; did you mean tiny"),
        (["tenants=[toy,toyy]"], "tenants=toyy: no such tenants; did you mean toy? choose one of libero, maniskill"),
        (["[toy"], "LexerNoViableAltException: [toy"),
    ],
)
def test_what_hydra_refuses_is_told_in_our_words(compose, arguments, expected):
    with pytest.raises(Exception) as error:
        compose("+tenants=[toy]", *arguments)
    found = composition_error(error.value, ROOT / "conf", ["+tenants=[toy]", *arguments])
    assert len(found.problems) == 1 and expected in found.problems[0], found


def test_a_refusal_is_the_same_on_every_rank():
    error = ConfigError(["seed=1: a", "seed=2: b"])
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_two_tenants_with_one_name_are_refused(compose):
    with pytest.raises(ConfigCompositionException, match="toy"):
        compose("+tenants=[toy,toy]")
    config = compose("+tenants=[toy]", "+tenant@tenants.Toy=toy")
    assert "tenants.Toy" in problems(config)


def test_missing_values_are_all_listed(compose):
    with pytest.raises(ConfigError) as error:
        compose("+tenants=[toy]", "tenants.toy.schema.chunk=???", "tenants.toy.algorithm.chunks_per_job=???")
    assert "tenants.toy.schema.chunk" in str(error.value)
    assert "tenants.toy.algorithm.chunks_per_job" in str(error.value)


def test_everything_wrong_is_listed_at_once(compose):
    config = compose("+tenants=[toy,toy_sft]")
    toy, sft = config.tenants["toy"], config.tenants["toy_sft"]
    toy.schema.execute = 5
    toy.head["learning_rate"] = 3
    toy.environment.simulator["horizn"] = 3
    sft.dataset.record = None
    sft.dataset.root = "/nowhere/at/all"
    sft.schema.cameras = ["front"]
    sft.max_in_flight = 0
    config.placement.precision = "16-mixed"
    text = problems(config)
    for expected in (
        "tenants.toy.schema.execute=5: must not exceed chunk=2",
        "tenants.toy.head.learning_rate=3: ChunkMLPHead has no such key; valid keys:",
        "tenants.toy.environment.simulator.horizn=3",
        "tenants.toy_sft.dataset.root=/nowhere/at/all: no LeRobotDataset there",
        "tenants.toy_sft.environment.simulator.cameras=['camera']: differs from tenants.toy_sft.schema.cameras",
        "tenants.toy_sft.max_in_flight=0",
        "placement.precision=16-mixed",
    ):
        assert expected in text


def test_missing_package_names_the_install_line(compose, monkeypatch):
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "mani_skill" else find(name, *a))
    text = problems(compose("+tenants=[maniskill]"))
    assert "package mani_skill is missing; pip install 'nexus-lightning[maniskill]'" in text


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("task", "offline", "choose one of sft, rl, offline_rl"),
        ("head", {"_target_": "models.heads.mlp.NoSuchHead", "lr": 1e-3}, "cannot be imported"),
        ("head", {"_target_": "models.heads.mlp.ChunkMLPHead"}, "a positive learning rate is required"),
        ("weight", 0.0, "must be positive"),
        ("algorithm", None, "task rl needs an algorithm"),
        ("environment", None, "task rl needs an environment"),
    ],
)
def test_bad_tenant_values(compose, key, value, expected):
    config = compose("+tenants=[toy]")
    setattr(config.tenants["toy"], key, value)
    assert expected in problems(config)


def test_rl_refuses_a_head_without_log_probs(compose):
    config = compose("+tenants=[toy]")
    config.tenants["toy"].head = {"_target_": "example_head.LinearChunkHead", "lr": 1e-3}
    assert "has no log-probabilities" in problems(config)


def test_a_run_that_never_ends_is_refused(compose):
    config = compose("+tenants=[toy]", "tenants.toy.target_jobs=null")
    assert "nothing ends this run" in problems(config)
    config.trainer.max_time = "00:00:05:00"
    validate(config)


def test_recipe_and_tenant_must_share_a_schema(compose):
    config = compose("+tenants=[maniskill]")
    recipe = config.tenants["maniskill"].init_from.recipe
    recipe["schema"] = replace(recipe["schema"], chunk=8)
    assert "init_from.recipe.schema: differs from tenants.maniskill.schema in chunk" in problems(config)


def test_changing_what_is_recorded_changes_its_folder_and_nothing_else_does(compose, tmp_path):
    from nexus_lightning.config import dataset_root

    def root(*overrides):
        return dataset_root(compose("+tenants=[toy_sft]", *overrides).tenants["toy_sft"], "data")

    assert root() == root("tenants.toy_sft.head.lr=1") != root("tenants.toy_sft.dataset.record.episodes=7")


def test_head_and_backbone_must_share_a_feature_kind(compose):
    config = compose("+tenants=[toy_sft]")
    config.tenants["toy_sft"].head["kind"] = "kv"
    assert "tenants.toy_sft.head on backbone EffNetMiniLM: kind='kv'" in problems(config)
    config.tenants["toy_sft"].head = {"_target_": "test_config.KVHead", "lr": 1e-3}
    text = problems(config)
    assert "tenants.toy_sft.head=KVHead on backbone EffNetMiniLM: the head reads kv" in text
    assert "choose another head or backbone" in text


def test_a_recipe_is_held_to_the_backbone_too_and_a_head_must_be_one(compose):
    config = compose("+tenants=[maniskill]", "tenants.maniskill.init_from.recipe.head.kind=kv")
    assert "tenants.maniskill.init_from.recipe.head on backbone EffNetMiniLM: kind='kv'" in problems(config)
    config = compose("+tenants=[toy_sft]")
    config.tenants["toy_sft"].head = {"_target_": "torch.nn.Identity", "lr": 1e-3}
    assert "tenants.toy_sft.head=Identity: is not an ActionHead" in problems(config)


class KVHead(LinearChunkHead):
    reads = ("kv",)


def test_an_average_is_for_supervised_tenants(compose):
    config = compose("+tenants=[toy]", "tenants.toy.head.ema_decay=0.9")
    assert "tenants.toy.head.ema_decay=0.9: task rl must act with the weights it trains" in problems(config)
    config = compose("+tenants=[toy_sft]", "tenants.toy_sft.head.ema_decay=1.5")
    assert "tenants.toy_sft.head.ema_decay=1.5: must lie between 0 and 1" in problems(config)


def test_a_minibatch_may_be_larger_than_the_rollout(compose):
    validate(compose("+tenants=[toy]", "tenants.toy.algorithm.minibatch_size=97"))


@pytest.mark.parametrize(
    ("algorithm", "changes", "expected"),
    [
        (GRPO, {}, "group_size=None: grpo compares episodes of one initial state; it must be at least 2"),
        (GRPO, {"group_size": 1}, "group_size=1: grpo compares"),
        (GRPO, {"group_size": 3}, "group_size=3: must divide tenants.toy.environment.num_envs=8"),
        (GRPO, {"group_size": 4, "chunks_per_job": 5}, "grpo needs whole episodes; .* at least 6"),
        (Reinforce, {"epochs": 2}, "reinforce uses each rollout once; set it to 1"),
        (PPO, {"log_prob_level": "word"}, "log_prob_level=word: choose one of chunk, action, token"),
        (PPO, {"minibatch_size": 50}, "minibatch_size=50: must divide the 96 decisions of a rollout"),
        (PPO, {"minibatch_size": 0}, "minibatch_size=0: must be at least 1"),
        (PPO, {"discount_per": "hour"}, "discount_per=hour: choose one of chunk, step"),
        (PPO, {"chunks_per_job": None}, "algorithm.chunks_per_job: a value is required"),
        (PPO, {"clip_epsilon": 0.0}, "clip_epsilon=0.0: must be positive"),
        (PPO, {"entropy_coef": -1.0}, "entropy_coef=-1.0: must not be negative"),
        (PPO, {"gae_lambda": math.nan}, r"gae_lambda=nan: must lie in \[0, 1\]"),
        (AWR, {}, "algorithm=AWR: trains task offline_rl; .* choose one of grpo, ppo, reinforce"),
    ],
)
def test_bad_algorithms(compose, algorithm, changes, expected):
    config = compose("+tenants=[toy]")
    rollouts = {} if algorithm is AWR else {"chunks_per_job": 12, "minibatch_size": 48}
    config.tenants["toy"].algorithm = algorithm.configure(**{**rollouts, **changes})
    assert re.search(expected, problems(config))


def test_a_file_of_an_algorithm_says_what_its_class_does():
    """YAML holds the values and their comments, the class the types: both hold the same."""
    for name, algorithm in shipped().items():
        values = yaml.safe_load((ROOT / "conf" / "algorithm" / f"{name}.yaml").read_text())
        own = asdict(algorithm.configure())
        assert {key: None if value == "???" else value for key, value in values.items()} == own


def test_another_algorithm_takes_over_what_the_tenant_has_set(compose):
    def algorithm(*overrides, tenant="toy"):
        return compose(f"+tenants=[{tenant}]", *overrides).tenants[tenant].algorithm

    grpo = GRPO.configure(chunks_per_job=12, epochs=4, minibatch_size=48, group_size=4, proximal=True)
    asked = ["tenants.toy.algorithm.group_size=4", "tenants.toy.algorithm.proximal=true"]
    assert algorithm("tenants.toy.algorithm=grpo", *asked) == grpo, "gamma and gae_lambda are of PPO"
    assert algorithm("tenants.toy.algorithm.name=grpo", *asked) == grpo, "as it was written before"
    iql = ["tenants.toy_offline.algorithm=iql", "tenants.toy_offline.algorithm.expectile=0.5"]
    assert algorithm(*iql[:1], tenant="toy_offline") == IQL.configure(gamma=0.95, value_warmup_jobs=5)
    assert algorithm(*iql, tenant="toy_offline").expectile == 0.5, "AWR's default, but asked for"
    assert algorithm("algorithm@tenants.toy_offline.algorithm=iql", tenant="toy_offline").gamma == 0.95, "Hydra's own"
    with pytest.raises(HydraException, match="nope"):
        algorithm("tenants.toy.algorithm=nope")
    with pytest.raises(ConfigError, match=r"toy\.algorithm\.group_size=4: .* has no such key"):
        algorithm("tenants.toy.algorithm=reinforce", *asked[:1])
    mixed = algorithm("tenants.toy.algorithm=cotraining")
    assert mixed.sft_weight == 0.1 and mixed.gamma == 0.9


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"_target_": "mine.Nothing"}, r"t\.algorithm\._target_=mine\.Nothing: cannot be imported"),
        ({"_target_": "torch.nn.Identity"}, r"Identity: is no algorithm; subclass .*Objective"),
        ({"name": "trpo"}, r"algorithm\.name=trpo: no such name; .*choose one of awr, grpo, iql, ppo, reinforce, sft"),
        ({"name": "policy_gradient"}, "no such name"),
        ({"name": "ppo", "epochs": "many"}, r"t\.algorithm\.epochs: Value 'many'"),
        ({"clip_ratio": 0.1}, r"clip_ratio=0\.1: .* did you mean clip_epsilon"),
        ("ppo", r"t\.algorithm='ppo': must be a mapping"),
    ],
)
def test_what_is_no_algorithm_is_refused(values, expected):
    with pytest.raises(ConfigError, match=expected):
        typed_algorithm(values, "rl", "t.algorithm")


def test_a_payload_of_the_flat_algorithm_config_still_loads(compose):
    """What manifests held before an algorithm was a class."""
    flat = {
        "name": "iql", "chunks_per_job": None, "epochs": 4, "minibatch_size": 64, "gamma": 0.95,
        "discount_per": "chunk", "group_size": None, "gae_lambda": 0.95, "bootstrap_truncated": True,
        "clip_epsilon": 0.2, "proximal": False, "entropy_coef": 0.0, "critic_coef": 0.5, "value_warmup_jobs": 5,
        "sft_weight": None, "temperature": 0.1, "expectile": None, "target_rate": 0.05, "log_prob_level": "chunk",
        "log_prob": "sum",
    }  # fmt: skip
    tenant = asdict(compose("+tenants=[toy_offline]").tenants["toy_offline"])
    old = saved_tenant({**tenant, "algorithm": flat}, "manifest")
    assert old.algorithm == IQL.configure(gamma=0.95, value_warmup_jobs=5)
    assert saved_tenant({**tenant, "task": "sft", "algorithm": None}, "manifest").algorithm == SFT.configure()
    assert saved_tenant(asdict(old), "manifest") == old


def test_the_package_names_its_algorithms_in_their_files_alone():
    """What compares the name of an algorithm elsewhere would have to be changed for the next one."""
    names = "|".join(shipped())
    quoted = re.compile(rf"""["']({names})["']""")
    found = []
    for file in (ROOT / "nexus_lightning").rglob("*.py"):
        if file.parent.name != "objectives":
            lines = file.read_text().splitlines()
            found += [f"{file.name}: {line.strip()}" for line in lines if (m := quoted.search(line)) and m[1] != "sft"]
    assert found == [], "sft is also the name of a task"


def test_bounds_of_every_kind():
    bounds = {
        "must be at least 2": Bounds(least=2),
        "must not be negative": Bounds(least=0),
        "must be positive": Bounds(above=0),
        "must be above 3": Bounds(above=3),
        "must be at most 1": Bounds(most=1),
        "must be below 1": Bounds(below=1),
        "must lie between 0 and 1": Bounds(above=0, below=1),
        "must lie in (0, 1]": Bounds(above=0, most=1),
        "choose one of a, b": Bounds(choices=("a", "b")),
    }
    wrong = {"must be at most 1": 2, "must be below 1": 1, "must lie in (0, 1]": 1.5, "choose one of a, b": "c"}
    for text, each in bounds.items():
        assert each.problem(wrong.get(text, -1)) == text
    assert Bounds(above=0, most=1).problem(1) is None is Bounds(least=0).problem(0) is None


@pytest.mark.parametrize(
    "override",
    [
        "tenants.toy.weight=nan",
        "tenants.toy.head.lr=nan",
        "tenants.toy.head.lr=inf",
        "tenants.toy.algorithm.gamma=nan",
        "queues.training.lease_deadline_s=nan",
        "queues.inference.timeout_s=inf",
        "feature_store.budget_gb=nan",
    ],
)
def test_numbers_are_finite(compose, override):
    """NaN passes every comparison."""
    with pytest.raises(ConfigError) as error:
        validate(compose("+tenants=[toy]", override))
    assert any(problem.startswith(f"{override}: must be a finite number") for problem in error.value.problems)
