"""What every user of CUDA graph capture in torch needs after a capture that failed."""


def settle_generator() -> None:
    """End the state of "being captured" in which a failed capture leaves torch's default generator.

    torch ends it only when a capture succeeds; until then every random number on the device raises "Offset increment
    outside graph capture". So an empty graph is captured.
    """
    import warnings

    import torch

    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with warnings.catch_warnings(), torch.cuda.stream(stream):
        warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
        graph.capture_begin(capture_error_mode="thread_local")
        graph.capture_end()
