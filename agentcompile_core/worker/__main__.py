"""``python -m agentcompile_core.worker``: the child process. Started by ``client``; not for use by hand."""

from .server import main

if __name__ == "__main__":
    main()
