"""Making a sequence of operations repeatable: a recording (recording.py) on the CPU, a CUDA graph on a GPU.

again = capture(lambda: model_pass(buffers), device)   # runs it, checked as always
if again is not None:
    again()                                            # the same work on whatever the buffers hold now
"""

import torch

from .recording import record

IN_GRAPHS = {"cuda", "hip", "triton"}  # backends whose operations neither wait for the device nor read from it


def capture(run, device):
    """Calls ``run()`` once and returns a function that does that work again, or None if that can't be done.

    ``run`` makes operations of this library on tensors of ``device`` that stay where they are; what else it does in
    Python is done once. On a CPU every operation has to be the cpu backend's, and torch's own operations are not made
    again. On a GPU no operation may be the reference's; torch's own are part of the graph. The function keeps alive the
    tensors that it needs. It is not for two threads at once.
    """
    if torch.device(device).type == "cpu":
        with record() as recording:
            run()
        return recording.run if recording.complete else None
    return _graph(run, device)


def _graph(run, device):
    """Runs on a stream of its own first: that loads modules and compiles, which no graph may contain."""
    here, aside = torch.cuda.current_stream(device), torch.cuda.Stream(device)
    aside.wait_stream(here)
    with torch.cuda.stream(aside), record() as recording:
        run()
    here.wait_stream(aside)
    if not recording.backends <= IN_GRAPHS:
        return None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(device), torch.cuda.graph(graph, capture_error_mode="thread_local"):
        run()  # captured, not done again
    return _Replay(graph, recording.kept)


class _Replay:
    def __init__(self, graph, kept):
        self.graph, self.kept = graph, kept

    def __call__(self):
        self.graph.replay()
