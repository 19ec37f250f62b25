"""``python -m agentcompile_core.worker SOCKET``: what workers are forked from; not for use by hand."""

import sys

from ..processes.fork_server import serve
from .server import main

if __name__ == "__main__":
    serve(int(sys.argv[1]), main)
