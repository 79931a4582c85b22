"""An algorithm of one's own with the low-level verbs: supervised fine-tuning, written here, that ends in exactly the
weights of the server's built-in one.

    export NEXUS_URL=http://127.0.0.1:8000 NEXUS_TOKEN=nxl_...
    python scripts/examples/custom_sft_client.py data/demos/local_toy-...   # recorded by the server for sft_client.py

The client reads the demonstrations, decides on batches, learning rates and steps; forward, backward and the optimizer
run on the server. To be compared bit for bit, batches are drawn in the built-in order and images are encoded anew for
each batch (`features.reuse=never`) instead of being kept.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from sft_client import SCHEMA

from nexus_lightning.client import NexusClient

SEED, LR = 11, 1e-3
HEAD = {"name": "mlp", "hidden_dim": 64, "lr": LR, "lr_schedule": "constant"}


class Demonstrations:
    """Batches of a LeRobotDataset as arrays, in the order that the server draws them for a tenant of this seed."""

    def __init__(self, folder: Path, seed: int) -> None:
        from lerobot.datasets.lerobot_dataset import LeRobotDataset

        from nexus_lightning.producers.demonstrations import FrameOrder
        from nexus_lightning.tenant import derive_seed

        info = json.loads((folder / "meta" / "info.json").read_text())
        times = {"action": [i / info["fps"] for i in range(SCHEMA["chunk"])]}
        self.data = LeRobotDataset("local/toy", root=folder, delta_timestamps=times, video_backend="pyav")
        self.order = FrameOrder(len(self.data), derive_seed(seed, "order"))

    def batch(self, start: int, count: int) -> dict[str, Any]:
        """What :meth:`Tenant.forward_backward` takes: actions as the simulator takes them, nothing normalised."""
        items = [self.data[int(row)] for row in self.order.rows(start, count)]

        def stack(key: str) -> np.ndarray:
            return np.stack([item[key].numpy() for item in items])

        images = {camera: stack(f"observation.images.{camera}") for camera in SCHEMA["cameras"]}
        images = {camera: (image * 255).round().astype(np.uint8) for camera, image in images.items()}
        return {
            "observation": {"state": stack("observation.state"), "image": images},
            "action": stack("action"),
            "instructions": [item["task"] for item in items],
            "arrays": {"is_pad": stack("action_is_pad")},
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", type=Path, help="folder of the demonstrations that the server has recorded")
    parser.add_argument("--jobs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--batches-per-job", type=int, default=2)
    options = parser.parse_args()

    with NexusClient() as client:
        builtin = client.create_tenant("built-in", SCHEMA, HEAD, seed=SEED)
        dataset = {"name": "toy", "batch_size": options.batch_size, "batches_per_job": options.batches_per_job}
        work = {"target_jobs": options.jobs, "features": {"reuse": "never"}, "eval": {"episodes": 0}}
        print("built-in:", builtin.train("sft", dataset=dataset, **work).result())
        wanted = builtin.export_params().result()

        custom = client.create_tenant("custom", SCHEMA, HEAD, seed=SEED)
        # the same statistics; a client may compute them from its own data
        custom.load({name: array for name, array in wanted.items() if name.startswith("normalizer.")}).result()
        data = Demonstrations(options.dataset, SEED)
        for step in range(options.jobs * options.batches_per_job):
            loss = custom.forward_backward(**data.batch(step * options.batch_size, options.batch_size))
            update = custom.optim_step(lr=LR)  # sent behind the other without waiting for it
            print(f"step {step}  loss {loss.result()['loss:mean']:.4f}  version {update.result()['policy_version']}")
        found = custom.export_params().result()
        differing = [name for name in wanted if not np.array_equal(wanted[name], found[name])]
        print(f"{len(wanted)} tensors, {len(differing)} differ from the built-in algorithm's: {differing}")
        for tenant in (builtin, custom):
            tenant.delete()
    sys.exit(bool(differing))


if __name__ == "__main__":
    main()
