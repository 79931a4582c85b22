"""CUDA graphs of those parts of a backbone whose shapes repeat.

A small batch keeps a GPU waiting for the launches of hundreds of kernels; a graph launches them at once. TorchRL's
server captures its one policy as a whole (``static_batch_size``). Here a batch is served by heads that are picked per
request, and tokenising and padding look at values, which no graph can hold: so the backbone names the parts that only
depend on shapes (:func:`replay`), and only the inference server's thread replays them.

``tensordict.nn.CudaGraphModule`` captures in a mode in which an allocation by any other thread ruins the capture, and
the actor trains in another thread; hence torch's own ``CUDAGraph`` here, in the thread-local mode.
"""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

#: Graphs kept at most; each holds the memory of its activations.
MAX_GRAPHS = 32
#: Runs before a capture, so that libraries have chosen their kernels.
WARM_UP = 3

_here = threading.local()


def replay(name: str, function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """``function(*tensors)``, inside :func:`replaying` by a graph.

    Args:
        name: of this part of the backbone, the same for every call.
        function: depends on nothing but its arguments' values and frozen weights; what it launches depends on their
            shapes alone (no ``.item()``, no indexing by a mask, no randomness).
        tensors: all its arguments.
    """
    graphs: GraphCache | None = getattr(_here, "graphs", None)
    return function(*tensors) if graphs is None else graphs(name, function, *tensors)


@contextlib.contextmanager
def replaying(graphs: GraphCache | None) -> Iterator[None]:
    """In this thread :func:`replay` uses ``graphs``; None changes nothing."""
    before = getattr(_here, "graphs", None)
    _here.graphs = graphs
    try:
        yield
    finally:
        _here.graphs = before


def static_rows(rows: int, limit: int) -> int:
    """Rows of a pass that holds ``rows``: the next power of two, at most ``limit``.

    Example:
        >>> [static_rows(rows, limit=48) for rows in (1, 3, 16, 33)]
        [1, 4, 16, 48]
    """
    return min(1 << (rows - 1).bit_length(), limit)


class GraphCache:
    """Graphs of one backbone, by part and shapes; for one thread. Its weights must stay where they are.

    A shape is captured when it comes for the second time; the least recently used of :data:`MAX_GRAPHS` leaves. The
    first replay is compared with what the kernels themselves give.

    Args:
        capture: ``(function, tensors) -> callable``; the callable may answer in the same tensor every time.
    """

    def __init__(self, capture: Callable[[Callable[..., Tensor], tuple[Tensor, ...]], Callable[..., Tensor]]) -> None:
        self._capture = capture
        self._graphs: OrderedDict[tuple, Callable[..., Tensor] | None] = OrderedDict()
        self.captured = 0
        self.replayed = 0

    def __call__(self, name: str, function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        key = (name, *((tuple(t.shape), t.stride(), t.dtype, t.device) for t in tensors))
        if key not in self._graphs:
            self._graphs[key] = None
            while len(self._graphs) > MAX_GRAPHS:
                self._graphs.popitem(last=False)
            return function(*tensors)
        graph = self._graphs[key]
        if graph is None:
            graph = self._graphs[key] = self._capture(function, tensors)
            self.captured += 1
            _compare(name, graph(*tensors), function(*tensors))
        self._graphs.move_to_end(key)
        self.replayed += 1
        return graph(*tensors).clone()  # the next replay writes into the same memory


def capture_graph(function: Callable[..., Tensor], tensors: tuple[Tensor, ...]) -> Callable[..., Tensor]:
    """Record what ``function`` launches for tensors like these (PyTorch's "CUDA semantics", "CUDA Graphs")."""
    inputs = tuple(t.clone(memory_format=torch.preserve_format) for t in tensors)
    side = torch.cuda.Stream(tensors[0].device)
    side.wait_stream(torch.cuda.current_stream(tensors[0].device))
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            function(*inputs)
    torch.cuda.current_stream(tensors[0].device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
        output = function(*inputs)

    def run(*values: Tensor) -> Tensor:
        for target, value in zip(inputs, values, strict=True):
            target.copy_(value, non_blocking=True)
        graph.replay()
        return output

    return run


def _compare(name: str, replayed: Tensor, computed: Tensor) -> None:
    try:
        torch.testing.assert_close(replayed, computed)
    except AssertionError as error:
        raise RuntimeError(
            f"the CUDA graph of the backbone's {name} gives other values than its kernels; "
            f"set queues.inference.static_batch_size=null ({str(error).splitlines()[0]})"
        ) from error


def graphs_for(device: torch.device, static_batch_size: int | None) -> GraphCache | None:
    """What the option asks for on this device: nothing on a CPU, which launches nothing."""
    return GraphCache(capture_graph) if static_batch_size is not None and device.type == "cuda" else None
