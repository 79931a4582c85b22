"""Supervised fine-tuning on a running server (scripts/serve.py), and its policy on this machine afterwards.

export NEXUS_URL=http://127.0.0.1:8000 NEXUS_TOKEN=nxl_...
python scripts/examples/sft_client.py --out exported
"""

import argparse

from nexus_lightning.client import NexusClient

SCHEMA = {  # what the robot looks like, as in conf/tenant/toy_sft.yaml
    "cameras": ["camera"],
    "image_size": 32,
    "state_dim": 4,
    "action_dim": 2,
    "chunk": 2,
    "execute": 2,
    "control_hz": 10.0,
    "action_convention": "absolute",
    "rotation": "none",
    "gripper": "none",
    "privileged": ["target_action"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=20)
    parser.add_argument("--episodes", type=int, default=20)
    parser.add_argument("--out", default="exported")
    options = parser.parse_args()

    with NexusClient() as client:
        head = {"name": "mlp", "hidden_dim": 64, "lr": 1e-3}
        tenant = client.create_tenant("sft-example", SCHEMA, head, seed=0)
        workload = tenant.train("sft", dataset="toy", target_jobs=options.jobs, eval={"episodes": 0})
        trained = workload.result(progress=True)
        print(f"trained {trained['jobs']} jobs, policy version {trained['policy_version']}")
        found = tenant.evaluate(options.episodes, environment="toy", num_envs=2).result()
        print(f"success {found['success_rate']:.0%} of {found['n']} ({found['ci_low']:.0%} .. {found['ci_high']:.0%})")
        saved = tenant.export().result()
        print(f"payload in {tenant.download(saved['policy_version'], options.out)}")


if __name__ == "__main__":
    main()
