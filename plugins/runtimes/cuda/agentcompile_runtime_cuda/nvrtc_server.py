"""The child process that calls NVRTC: JSON requests in, JSON answers out (see ``agentcompile_core.processes.toolchain``)."""

import base64
import json
from typing import Any

from agentcompile_core.plugin_api import serve


def check(result: tuple[Any, ...]) -> Any:
    """The values of a binding's result tuple.

    Raises:
        RuntimeError: its status is not success.
    """
    from cuda.bindings import nvrtc

    status, *values = result
    if int(status) != 0:
        raise RuntimeError(nvrtc.nvrtcGetErrorString(status)[1].decode())
    return values[0] if len(values) == 1 else tuple(values)


def compile_cubin(name: str, code: str, headers: list[tuple[str, str]], options: list[str]) -> tuple[bytes | None, str]:
    """Compile one source. Returns the cubin, or None where the source is wrong, and the log."""
    from cuda.bindings import nvrtc

    texts = [text.encode() for _, text in headers]
    names = [header.encode() for header, _ in headers]
    program = check(nvrtc.nvrtcCreateProgram(code.encode(), name.encode(), len(headers), texts, names))
    try:
        encoded = [option.encode() for option in options]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
        log = bytearray(check(nvrtc.nvrtcGetProgramLogSize(program)))
        check(nvrtc.nvrtcGetProgramLog(program, log))
        text = bytes(log).rstrip(b"\0").decode(errors="replace")
        if int(status) != 0:
            return None, text or nvrtc.nvrtcGetErrorString(status)[1].decode()
        cubin = bytearray(check(nvrtc.nvrtcGetCUBINSize(program)))
        check(nvrtc.nvrtcGetCUBIN(program, cubin))
        return bytes(cubin), text
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def answer(request: bytes) -> bytes:
    """Answer one request: ``{name, code, headers, options}`` gives ``{cubin (base64 or null), log}``."""
    asked = json.loads(request)
    try:
        headers = [(name, text) for name, text in asked["headers"]]
        cubin, log = compile_cubin(asked["name"], asked["code"], headers, asked["options"])
    except Exception as exc:  # a broken installation of NVRTC; the message is all that the parent can use
        cubin, log = None, f"NVRTC error: {type(exc).__name__}: {exc}"
    encoded = None if cubin is None else base64.b64encode(cubin).decode()
    return json.dumps({"cubin": encoded, "log": log}).encode()


if __name__ == "__main__":
    serve(answer)
