"""The time of the GPU alone: replays of a CUDA graph, which need no Python."""

from __future__ import annotations

import torch

from experiments.overhead.memory import Step

RUNS = 10  # runs of a step in one graph, because starting a graph takes some microseconds
_WARM = 3  # runs before the capture, which compile kernels and fill torch's caches


def replayed(step: Step, device: torch.device) -> tuple[Step, int]:
    """Return a step as a CUDA graph, and its runs in the graph; on a CPU the step itself, and 1."""
    if device.type != "cuda":
        return step, 1
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(_WARM):
            step()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(RUNS):
            step()
    return graph.replay, RUNS
