"""The clients of service.py: a process of its own without torch, so that they do not share the server's interpreter.

Reads a JSON command a line on stdin, answers with a JSON line: ``{"sessions": n, "decisions": k}`` gives the seconds of
every prediction and the predictions per second; ``{"heartbeat_s": s}`` the seconds of every /healthz for so long.
"""

import json
import sys
import threading
import time
from typing import Any

import numpy as np

from nexus_lightning.client import NexusClient

#: Predictions of each session that are not counted: the queue learns who comes back.
WARM_UP = 2


def observation(seed: int, image_size: int, state_dim: int) -> dict[str, Any]:
    random = np.random.default_rng(seed)
    image = random.integers(0, 256, (1, 3, image_size, image_size), dtype=np.uint8)
    return {"state": random.normal(size=(1, state_dim)).astype(np.float32), "image": {"base_camera": image}}


def closed_loop(predict: Any, sessions: int, decisions: int) -> dict[str, Any]:
    """``sessions`` threads that each ask, wait for the answer, and ask again.

    Args:
        predict: called with the number of the session.
    """
    latencies: list[list[float]] = [[] for _ in range(sessions)]
    spans, errors, ready = [], [], threading.Barrier(sessions)

    def session(i: int) -> None:
        try:
            ready.wait(120)
            for k in range(decisions + WARM_UP):
                start_s = time.perf_counter()
                if k == WARM_UP:
                    first_s = start_s
                predict(i)
                latencies[i].append(time.perf_counter() - start_s)
            spans.append((first_s, time.perf_counter()))
        except Exception as error:
            errors.append(error)
            ready.abort()

    threads = [threading.Thread(target=session, args=(i,)) for i in range(sessions)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    rate = sessions * decisions / (max(end for _, end in spans) - min(start for start, _ in spans))
    return {"latencies_s": [s for mine in latencies for s in mine[WARM_UP:]], "per_s": rate}


def heartbeat(client: NexusClient, seconds: float, every_s: float = 0.02) -> list[float]:
    """What a liveness probe sees."""
    from nexus_lightning.client.http import Call

    found, end_s = [], time.perf_counter() + seconds
    while time.perf_counter() < end_s:
        start_s = time.perf_counter()
        client._transport.call(Call("GET", "/healthz"))
        found.append(time.perf_counter() - start_s)
        time.sleep(every_s)
    return found


def main() -> None:
    setup = json.loads(sys.stdin.readline())
    client = NexusClient(setup["url"], setup["token"])
    tenants = [client.tenant(name) for name in setup["tenants"]]
    most = [observation(i, setup["image_size"], setup["state_dim"]) for i in range(setup["sessions"])]
    texts = setup["instructions"]

    def predict(i: int) -> None:
        tenants[i % len(tenants)].predict(most[i], [texts[i % len(texts)]])

    for line in sys.stdin:
        command = json.loads(line)
        if "heartbeat_s" in command:
            answer: Any = heartbeat(client, command["heartbeat_s"])
        else:
            answer = closed_loop(predict, command["sessions"], command["decisions"])
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
