"""What is wrong with a dataset is found before anything is built, and every hint works as it is printed."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pyarrow
import pyarrow.parquet
import pytest
from lerobot_data import Data, write

from nexus_lightning.config import (
    ConfigError,
    NexusConfig,
    PlacementConfig,
    TenantConfig,
    hydra_overrides,
    tenant_from_dict,
    validate,
)
from nexus_lightning.dataset import chosen_episodes, lerobot_home, named_root

T = "tenants.toy_sft"


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("made") / "good"
    write(root, Data({"observation.images.camera": (24, 32)}))
    return root


@pytest.fixture
def problems(compose):
    """``problems(root, *overrides)``: what the configuration of a tenant on that dataset is refused with."""

    def find(root: Path | None, *overrides: str) -> list[str]:
        own = [f"{T}.schema.privileged=[]", f"{T}.dataset.record=null", f"{T}.environment=null", f"{T}.eval.episodes=0"]
        own += [] if root is None else [f"{T}.dataset.root='{root}'"]
        config = compose("+tenants=[toy_sft]", *own, *overrides)
        try:
            validate(config)
        except ConfigError as error:
            return error.problems
        return []

    return find


def edit(root: Path, name: str, change) -> None:
    path = root / "meta" / name
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def edit_column(root: Path, name: str, change) -> None:
    path = next(root.glob("data/*/*.parquet"))
    table = pyarrow.parquet.read_table(path)
    place = table.column_names.index(name)
    values = table[name].to_pylist()
    change(values)
    table = table.set_column(place, table.schema.field(place), pyarrow.array(values, table.schema.field(place).type))
    pyarrow.parquet.write_table(table, path)


def test_a_good_dataset_has_no_problems(made, problems):
    assert problems(made) == []


# ---- one fault each --------------------------------------------------------------------------------------------------


def v21(root):
    edit(root, "info.json", lambda v: v.update(codebase_version="v2.1"))


def v20(root):
    edit(root, "info.json", lambda v: v.update(codebase_version="v2.0"))


def broken_info(root):
    (root / "meta" / "info.json").write_text('{"fps": ')


def no_features(root):
    edit(root, "info.json", lambda v: v.pop("features"))


def fps(root):
    edit(root, "info.json", lambda v: v.update(fps=29.97))


def no_stats(root):
    (root / "meta" / "stats.json").unlink()


def no_quantiles(root):
    edit(root, "stats.json", lambda v: [s.pop(q) for s in v.values() for q in list(s) if q.startswith("q")])


def nan(root):
    edit_column(root, "action", lambda rows: rows[6].__setitem__(1, float("nan")))


def infinite(root):
    edit_column(root, "observation.state", lambda rows: [r.__setitem__(0, float("inf")) for r in (rows[0], rows[11])])


def null(root):
    edit_column(root, "action", lambda rows: rows.__setitem__(4, None))


def no_file(root):
    next(root.glob("data/*/*.parquet")).unlink()


def truncated(root):
    path = next(root.glob("data/*/*.parquet"))
    path.write_bytes(path.read_bytes()[:-200])


def no_instruction(root):
    edit_column(root, "task_index", lambda rows: rows.__setitem__(5, 3))


def grey(root):
    edit(root, "info.json", lambda v: v["features"]["observation.images.camera"].update(shape=[24, 32, 1]))


def depth(root):
    edit(root, "info.json", lambda v: v["features"]["observation.images.camera"].update(info={"is_depth_map": True}))


COMMAND = "python -m lerobot.scripts.convert_dataset_v21_to_v30 --repo-id=local/toy --root={root} --push-to-hub=false"
FAULTS = {
    v21: rf"{T}\.dataset: dataset {{root}} has format v2\.1, v3\.0 is needed; convert it with {COMMAND}",
    v20: "has format v2.0, .* convert it to v2.1 with the LeRobot that made it first",
    broken_info: r"{root}/meta/info.json cannot be read \(JSONDecodeError",
    no_features: r"{root}/meta/info.json cannot be read \(KeyError\('features'\)\)",
    fps: rf"{T}\.schema\.control_hz=10: dataset {{root}} has fps 29\.97; set {T}\.schema\.control_hz=29\.97",
    no_stats: rf"no max, mean, min, q01, q99, std of 'action' in meta/stats.json; set {T}\.dataset\.statistics=frames",
    no_quantiles: r"no q01, q99 of 'action' .*--repo-id=local/toy --root={root}, or set .*statistics=frames",
    nan: rf"dataset {{root}}: 'action' of episode 1, frame 2 is \[.*, nan\]; mend .*: {T}\.dataset\.exclude=\[\.\.\.\]",
    infinite: r"'observation.state' of episode 0, frame 0 is \[inf, .*\], in all 2 frames",
    null: r"'action' of episode 1, frame 0 is \[nan, nan\]",
    no_file: r"1 of its files are missing, for example data/chunk-000/file-000\.parquet",
    truncated: r"data/chunk-000/file-000\.parquet cannot be read",
    no_instruction: r"instructions: episode 1, frame 1 has none; .*rename\.instruction=<dataset key>",
    grey: r"'observation.images.camera' of dataset {root} is of 1 channel\(s\), a policy sees three colour channels",
    depth: r"'observation.images.camera' of dataset {root} is a depth map",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_is_named_with_its_place_and_its_fix(made, problems, tmp_path, fault):
    root = Path(shutil.copytree(made, tmp_path / "x"))
    fault(root)
    found = problems(root, f"{T}.schema.action_normalization=quantile")
    wanted = FAULTS[fault].replace("{root}", re.escape(str(root)))
    assert any(re.search(wanted, p) for p in found), found
    assert all(p.startswith(T) for p in found)


def test_the_faults_of_all_tenants_come_at_once(made, problems, tmp_path):
    bad = Path(shutil.copytree(made, tmp_path / "x"))
    v21(bad)
    more = [f"tenants.other.{key}" for key in (f"dataset.root='{bad}'", "dataset.record=null", "environment=null")]
    found = problems(
        made, f"{T}.schema.action_dim=3", "+tenant@tenants.other=toy_sft", *more, "tenants.other.eval.episodes=0"
    )
    assert any(p.startswith(f"{T}.schema.action_dim=3: dataset") for p in found)
    assert any(p.startswith("tenants.other.dataset: ") and "v2.1" in p for p in found)


def test_a_fault_in_an_episode_that_is_left_out_is_none(made, problems, tmp_path):
    root = Path(shutil.copytree(made, tmp_path / "x"))
    nan(root)
    assert len(problems(root)) == 1
    assert problems(root, f"{T}.dataset.exclude=[1]") == []
    assert problems(root, f"{T}.dataset.episodes=[0,2]") == []


def test_the_fixes_that_are_printed_work(made, problems, tmp_path):
    root = Path(shutil.copytree(made, tmp_path / "x"))
    fps(root)
    no_stats(root)
    overrides: list[str] = []
    for _ in range(3):
        found = problems(root, *overrides)
        overrides += sorted({fix for p in found for fix in re.findall(r"set (\S+=[\w.]+)", p)} - set(overrides))
    assert overrides == [f"{T}.schema.control_hz=29.97", f"{T}.dataset.statistics=frames"]
    assert problems(root, *overrides) == []


def test_timestamps_beside_their_video_frames(tmp_path, problems):
    root = tmp_path / "x"
    write(root, Data({"observation.images.camera": (48, 64)}, video=True))
    assert problems(root) == []
    edit_column(root, "timestamp", lambda rows: rows.__setitem__(7, rows[7] + 0.004))
    found = problems(root)
    assert len(found) == 1 and re.search(r"timestamps: episode 1, frame 3 is 0\.0040 s beside its time", found[0])
    assert problems(root, f"{T}.dataset.tolerance_s=0.005") == []
    assert "tolerance_s=-1" in problems(root, f"{T}.dataset.tolerance_s=-1")[0]


def test_a_dataset_by_name_is_checked_alike(made, problems, tmp_path, monkeypatch):
    from lerobot.utils import constants

    assert lerobot_home() == constants.HF_LEROBOT_HOME
    home = tmp_path / "home"
    shutil.copytree(made, home / "local" / "mine")
    monkeypatch.setenv("HF_LEROBOT_HOME", str(home))
    own = [f"{T}.dataset.root=null", f"{T}.dataset.repo_id=local/mine"]
    assert named_root("local/mine") == home / "local" / "mine"
    assert problems(None, *own) == []
    found = problems(None, *own, f"{T}.schema.cameras=[front]")
    assert (
        len(found) == 1
        and "has no camera 'observation.images.front'; its cameras are observation.images.camera" in found[0]
    )
    nan(home / "local" / "mine")
    assert "'action' of episode 1, frame 2" in problems(None, *own)[0]
    found = problems(None, own[0], f"{T}.dataset.repo_id=local/other")
    assert f"repo_id=local/other: no such dataset in {home}, and HF_HUB_OFFLINE" in found[0]


def test_a_dataset_in_the_hubs_cache_is_found(made, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_LEROBOT_HOME", str(tmp_path))
    folder = tmp_path / "hub" / "datasets--lab--mine"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "v3.0").write_text("abc")
    shutil.copytree(made, folder / "snapshots" / "abc")
    assert named_root("lab/mine") == folder / "snapshots" / "abc"


# ---- keys ------------------------------------------------------------------------------------------------------------


def test_other_keys_are_named_and_the_hints_work_as_printed(tmp_path, problems):
    vectors = {"state": ((4,), "float32"), "actions": ((2,), "float32")}
    write(tmp_path / "x", Data({"image": (24, 32), "wrist_image": (8, 9)}, vectors))
    found = problems(tmp_path / "x")
    hints = {}
    for problem in found:
        hint = re.search(r"map it with (\S+?)=<dataset key>", problem)
        assert hint is not None, problem
        hints[hint[1]] = problem
    assert "its cameras are image, wrist_image" in hints[f"{T}.dataset.rename.cameras.camera"]
    assert "its columns of numbers are state [4], actions [2]" in hints[f"{T}.dataset.rename.state"]
    assert "dataset.rename.action=action: dataset" in hints[f"{T}.dataset.rename.action"]
    names = {"cameras.camera": "image", "state": "state", "action": "actions"}
    mapped = [f"{hint}={names[hint.split('.rename.')[1]]}" for hint in hints]
    assert problems(tmp_path / "x", *mapped) == []


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["schema.state_dim=3"], "observation.state of length 4; set tenants.toy_sft.schema.state_dim=4"),
        (["dataset.rename.state=[observation.state,action]"], "observation.state + action of length 6; set"),
        (["dataset.rename.state=observation.images.camera"], "is image of shape [24, 32, 3]; its columns of numbers"),
        (["dataset.rename.state=[]"], "rename.state=[]: a key of the dataset, or a list of them"),
        (["dataset.rename.instruction=words"], "rename.instruction=words: dataset"),
        (["dataset.rename.cameras.top=x"], "rename.cameras: ['top'] are not in schema.cameras=['camera']"),
        (["dataset.statistics=mine"], "statistics=mine: choose one of stored, frames"),
        (["schema.action_dim=3"], "action of length 2"),
        (["dataset.episodes=5"], "dataset.episodes=5: dataset {root} has 3; ask for at most 3"),
        (["dataset.episodes=0"], "dataset.episodes=0: at least 1, or null for all"),
        (["dataset.episodes=[0,7]"], "dataset.episodes: dataset {root} has no episode 7, there are 3: 0 to 2"),
        (["dataset.exclude=[3]"], "dataset.exclude: dataset {root} has no episode 3, there are 3: 0 to 2"),
        (["dataset.exclude=[0-2]"], "dataset.exclude=['0-2']: leaves no episode"),
        (["dataset.episodes=[2-1]"], "dataset.episodes: '2-1' is neither an episode nor a range such as 10-49"),
        (["dataset.episodes=[1.5]"], "dataset.episodes: 1.5 is neither"),
        (["dataset.episodes=true"], "dataset.episodes=True: a list of numbers and ranges"),
    ],
)  # fmt: skip
def test_settings_that_do_not_fit_the_dataset(made, problems, overrides, expected):
    found = problems(made, *(f"{T}.{each}" for each in overrides))
    assert len(found) == 1 and expected.replace("{root}", str(made)) in found[0], found


def test_offline_rl_names_the_columns_it_needs(made, compose):
    def find(*overrides):
        tenant = "tenants.toy_offline"
        own = [f"{tenant}.dataset.record=null", f"{tenant}.dataset.root='{made}'", f"{tenant}.schema.cameras=[]"]
        with pytest.raises(ConfigError) as error:
            validate(compose("+tenants=[toy_offline]", *own, *(f"{tenant}.{each}" for each in overrides)))
        return "\n".join(error.value.problems)

    assert "toy_offline.task=offline_rl: dataset" in find() and "has no next.reward or next.success" in find()
    assert "rename.reward: dataset" in find("dataset.rename.reward=score") and "no score" in find(
        "dataset.rename.reward=score"
    )


def test_episodes_are_a_number_or_a_list_of_numbers_and_ranges():
    assert chosen_episodes(None, [], 5) is None
    assert chosen_episodes(2, [], 5) == [0, 1]
    assert chosen_episodes(2, [0], 5) == [1]
    assert chosen_episodes([4, "1-2", "0"], [], 5) == [0, 1, 2, 4]
    assert chosen_episodes("1-3", [], 5) == [1, 2, 3]
    assert chosen_episodes(None, ["1-3"], 5) == [0, 4]
    with pytest.raises(ValueError, match="no episode 99999999999, there are 5"):  # and no memory is asked for them
        chosen_episodes(["0-99999999999"], [], 5)
    with pytest.raises(ValueError, match="there are 5; ask for at most 5"):
        chosen_episodes(10**12, [], 5)


def test_payloads_from_before_rename_can_still_be_read():
    values = {
        "task": "sft",
        "schema": {"state_dim": 4, "action_dim": 2, "chunk": 1, "execute": 1},
        "head": {"_target_": "x"},
        "dataset": {"repo_id": "a/b", "camera_keys": {"front": "image"}},
    }
    config = tenant_from_dict(values, "manifest")
    assert config.dataset is not None and config.dataset.rename.cameras == {"front": "image"}
    assert values["dataset"] == {"repo_id": "a/b", "camera_keys": {"front": "image"}}, "the caller's own"


# ---- what is null by default can be set from the command line --------------------------------------------------------


def nulls(cls: Any, prefix: str = "") -> list[str]:
    """Every key whose value is a node of its own, null by default or perhaps in a YAML file."""
    found, hints = [], get_type_hints(cls)
    for each in fields(cls):
        inner = next((choice for choice in get_args(hints[each.name]) if is_dataclass(choice)), None)
        if inner is not None and type(None) in get_args(hints[each.name]):
            found += [f"{prefix}{each.name}", *nulls(inner, f"{prefix}{each.name}.")]
    return found


#: A part of each such node with its value, and what else the node requires, on the command line.
PARTS = {
    "dataset": ("repo_id", "a/b", {}),
    "dataset.record": ("expert", "a.b", {"episodes": "3"}),
    "dataset.augmentation": ("views", 3, {}),
    "environment": ("num_envs", 5, {"simulator": "{_target_: envs.toy.ToySimulator}"}),
}


def test_no_such_node_is_forgotten():
    assert sorted(nulls(TenantConfig)) == sorted(PARTS)
    assert nulls(NexusConfig) == [] and nulls(PlacementConfig) == ["ray"]


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("plus", ["", "+", "++"])
def test_a_node_that_is_null_can_be_set(compose, name, whole, plus):
    part, value, required = PARTS[name]
    tenant = "toy"
    key = f"tenants.{tenant}.{name}"
    if name == "environment":  # null in no file
        plus = plus.replace("+", "++", 1)[:2]
    if whole:
        words = ", ".join(f"{k}: {v}" for k, v in {part: value, **required}.items())
        given = [f"{plus}{key}={{{words}}}"]
    else:
        given = [f"{plus}{key}.{part}={value}", *(f"{plus}{key}.{k}={v}" for k, v in required.items())]
    if name.startswith("dataset."):
        given.append("tenants.toy.dataset.repo_id=c/d")
    node: Any = compose(f"+tenants=[{tenant}]", *given).tenants[tenant]
    for step in name.split("."):
        node = getattr(node, step)
    assert is_dataclass(node) and getattr(node, part) == value


def test_the_other_settings_of_a_mapping(compose):
    ray = compose("+tenants=[toy]", "placement.ray={address: 'a:1'}", "placement.ray.max_restarts=4").placement.ray
    assert (ray.address, ray.max_restarts) == ("a:1", 4)
    assert compose("+tenants=[toy]", "placement.environments.toy=[0]").placement.environments == {"toy": [0]}
    assert compose("+tenants=[toy]", "placement.environments={toy: [0]}").placement.environments == {"toy": [0]}
    assert hydra_overrides(["tenants.a.dataset.root=x", "tenants.a.weight=2", "logger=csv"]) == [
        "tenants.a.dataset.root=x",
        "tenants.a.weight=2",
        "logger=csv",
    ]


def test_a_mistake_inside_is_told_as_elsewhere(compose):
    with pytest.raises(ConfigError) as error:
        compose("+tenants=[toy]", "tenants.toy.dataset={repo_id: a/b, batch_sise: 3}")
    assert "tenants.toy.dataset.batch_sise=3: tenants.toy.dataset has no such key; did you mean batch_size" in str(
        error.value
    )
    with pytest.raises(ConfigError, match="batch_size: Value 'many'"):
        compose("+tenants=[toy]", "tenants.toy.dataset={repo_id: a/b, batch_size: many}")


# ---- tenants without a state -----------------------------------------------------------------------------------------


def test_a_tenant_without_a_state_trains_and_is_evaluated(compose):
    from nexus_lightning.trainer import train

    config = compose(
        "+tenants=[toy_sft]", f"{T}.schema.state_dim=0", f"{T}.schema.privileged=[]", f"{T}.dataset.record.episodes=2",
        f"{T}.target_jobs=1", f"{T}.dataset.batches_per_job=2", f"{T}.eval.episodes=1",
        "trainer.enable_progress_bar=false",
    )  # fmt: skip
    config.backbone = {"_target_": "fakes.FakeBackbone"}
    tenant = train(config)["tenants"]["toy_sft"]
    assert tenant["quarantined"] is None and tenant["jobs_completed"] == 1 and tenant["eval"]["n"] == 1
