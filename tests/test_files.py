"""Two programs that want one folder: run folders, recordings, starting payloads."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from nexus_lightning import demonstrations, trainer
from nexus_lightning.config import ConfigError
from nexus_lightning.demonstrations import check_recording, describe_recording, record_demonstrations
from nexus_lightning.files import last_folder, made_once, new_folder, put_in_place, try_lock
from nexus_lightning.schema import TenantSchema

ROOT = Path(__file__).resolve().parent.parent


def test_callers_that_start_together_get_folders_of_their_own(tmp_path):
    with ThreadPoolExecutor(16) as pool:
        made = list(pool.map(lambda _: new_folder(tmp_path / "outputs", "run"), range(48)))
    assert len(set(made)) == 48 and all(folder.is_dir() for folder in made)
    assert {folder.name for folder in made} == {"run", *(f"run_{k}" for k in range(2, 49))}
    assert last_folder(tmp_path / "outputs", "run") == tmp_path / "outputs" / "run_48"
    assert last_folder(tmp_path / "outputs", "other") is None


def test_a_lock_is_given_back_when_its_process_is_killed(tmp_path):
    code = (
        "import sys, time; from pathlib import Path; from nexus_lightning.files import try_lock\n"
        "lock = try_lock(Path(sys.argv[1])); print(lock is not None, flush=True); time.sleep(60)"
    )
    holder = subprocess.Popen([sys.executable, "-c", code, tmp_path / "l"], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "True\n"
        assert try_lock(tmp_path / "l") is None
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()
    lock = try_lock(tmp_path / "l")
    assert lock is not None and try_lock(tmp_path / "l") is None
    lock.release()


def test_a_folder_is_made_once_and_the_others_wait(tmp_path, capsys):
    folder, times = tmp_path / "deep" / "made", []
    inside = threading.Barrier(2)

    def make(first: bool):
        with made_once(folder, "making"):
            if first:
                inside.wait()
                assert not folder.exists()
            if not folder.exists():
                folder.mkdir()
                times.append(first)

    one = threading.Thread(target=make, args=(True,))
    one.start()
    two = threading.Thread(target=make, args=(False,))
    two.start()
    inside.wait()
    one.join()
    two.join()
    assert times in ([True], [False]) and folder.is_dir()
    assert [path.name for path in folder.parent.iterdir() if path.is_dir()] == ["made"]


def test_the_slower_of_two_uses_what_the_faster_has_put_in_place(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "who").write_text(name)
    assert put_in_place(tmp_path / "a", tmp_path / "there") and not put_in_place(tmp_path / "b", tmp_path / "there")
    assert (tmp_path / "there" / "who").read_text() == "a" and not (tmp_path / "b").exists()
    (tmp_path / "c").mkdir()
    with pytest.raises(FileNotFoundError):
        put_in_place(tmp_path / "c", tmp_path / "missing" / "there")
    assert (tmp_path / "c").is_dir()


def test_two_recordings_of_one_dataset_record_it_once(tmp_path, monkeypatch):
    """In threads of one program, as two tenants that join; what a killed recording left is removed."""
    simulator = {"_target_": "envs.toy.ToySimulator", "action_dim": 2, "horizon": 6, "cameras": [], "image_size": 16}
    schema = TenantSchema(state_dim=4, action_dim=2, chunk=2, execute=2, gripper="none", control_hz=10.0)
    root, written = tmp_path / "data", []
    write = demonstrations._write

    def counted(*args):
        written.append(args[1])
        return write(*args)

    monkeypatch.setattr(demonstrations, "_write", counted)
    left = tmp_path / "data.recording-1"
    left.mkdir()
    (left / "half").write_text("of a recording that was killed")

    def record(_):
        arguments = {"episodes": 2, "first_seed": 0, "schema": schema, "inline": True, "progress": False}
        return record_demonstrations(simulator, "envs.experts.toy.make_expert", root, **arguments)

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(record, range(3))) == [root] * 3
    assert len(written) == 1
    check_recording(root, describe_recording(simulator, "envs.experts.toy.make_expert", 2, 0, schema))
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["data"]


def test_a_run_that_is_going_cannot_be_resumed(compose, monkeypatch):
    """Both would write one folder. Nothing in it changes, and the other one's end makes it free."""
    config = compose("+tenants=[toy]")
    run_dir, _ = trainer.resolve_run(config)
    checkpoint = run_dir / trainer.LAST_CHECKPOINT
    checkpoint.parent.mkdir()
    torch.save({"nexus": {"tenants": {}}}, checkpoint)
    kept = checkpoint.read_bytes()
    (run_dir / "config.yaml").write_text("as it was")
    (Path(config.output_dir) / "latest").symlink_to(run_dir.name)
    lock = try_lock(run_dir / trainer.RUN_LOCK)
    for given in ("last", str(run_dir)):
        config.ckpt_path = given
        with pytest.raises(ConfigError, match=rf"ckpt_path={given}: the run in \S+ is still going; wait"):
            trainer.train(config)
    assert (run_dir / "config.yaml").read_text() == "as it was" and checkpoint.read_bytes() == kept
    lock.release()
    (run_dir / "config.yaml").unlink()

    class Reached(Exception):
        pass

    def reached(config):
        raise Reached

    monkeypatch.setattr(trainer, "record_datasets", reached)
    with pytest.raises(Reached):
        trainer.train(config)
    assert try_lock(run_dir / trainer.RUN_LOCK) is not None, "released although the run has failed"


def test_runs_of_one_second_have_folders_of_their_own(compose, monkeypatch):
    monkeypatch.setattr(trainer.time, "strftime", lambda _: "2026-01-01_00-00-00")
    config = compose("+tenants=[toy]", "run_name=twin")
    with ThreadPoolExecutor(8) as pool:
        folders = [run_dir for run_dir, _ in pool.map(lambda _: trainer.resolve_run(config), range(8))]
    assert len(set(folders)) == 8
