"""The request itself, in a child process: what litellm imports, prints, logs and leaves running stays out of the compiler.

Parent to child, a JSON object per line: ``{"arguments", "environment"}``, keyword arguments for ``litellm.completion`` and
the variables to read keys and proxies from, which may have changed since the child began. Child to parent: ``{"ready"}``
once, then ``{"text", "tokens"}`` or ``{"error"}`` per line. The child ends when its input does, and is killed when a
deadline passes, which a server that sends a byte now and then cannot prevent.
"""

import json
import os
import subprocess
import sys
import threading
from typing import IO, Any

START_S = 120.0  # importing litellm takes seconds, more on a busy machine


class NoAnswer(Exception):
    """There is no answer; the text says why, and holds nothing that a provider wrote."""


class Asker:
    """One child, started with the first request and again after it was lost. Not for use by several threads."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[str] | None = None

    def ask(self, arguments: dict[str, Any], deadline_s: float) -> tuple[str, int]:
        """Text and tokens of one completion, asked under the environment that this process has now. Raises NoAnswer."""
        child = self._running()
        line = json.dumps({"arguments": arguments, "environment": dict(os.environ)})
        answer = self._exchange(child, line, deadline_s, f"no answer within {deadline_s:g} s")
        if "error" in answer:
            raise NoAnswer(str(answer["error"]))
        return str(answer["text"]), int(answer["tokens"])

    def close(self) -> None:
        """End the child."""
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            child.communicate()

    def _running(self) -> "subprocess.Popen[str]":
        if self._child is None or self._child.poll() is not None:
            self.close()
            self._child = subprocess.Popen([sys.executable, "-m", __name__], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                           stderr=subprocess.DEVNULL, text=True, encoding="utf-8")
            ready = self._exchange(self._child, "", START_S, f"litellm did not start within {START_S:g} s")
            if "error" in ready:
                self.close()
                raise NoAnswer(f"litellm cannot be used ({ready['error']}): pip install 'litellm>=1.83,<2'")
        return self._child

    def _exchange(self, child: "subprocess.Popen[str]", line: str, deadline_s: float, late: str) -> dict[str, Any]:
        assert child.stdin is not None and child.stdout is not None
        passed = threading.Event()

        def kill() -> None:
            passed.set()
            child.kill()

        timer = threading.Timer(deadline_s, kill)
        timer.daemon = True
        timer.start()
        try:
            if line:
                child.stdin.write(line + "\n")
                child.stdin.flush()
            answer = json.loads(child.stdout.readline())
        except (OSError, ValueError):
            answer = None
        finally:
            timer.cancel()
        if type(answer) is not dict:
            self.close()
            raise NoAnswer(late if passed.is_set() else "the process that asks has ended")
        return answer


def main() -> None:
    """Answer requests from standard input until it ends."""
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print must not be taken for an answer
    _set_environment(os.environ.copy())  # before the import
    try:
        _refuse_redirects()
        import litellm

        litellm.suppress_debug_info = True
        litellm.telemetry = False
    except Exception as exc:
        _send(channel, {"error": type(exc).__name__})
        return
    _send(channel, {"ready": True})
    for line in sys.stdin:
        request = json.loads(line)
        if _set_environment(request["environment"]):
            litellm.in_memory_llm_clients_cache.flush_cache()  # clients keep the proxies that they were made with
        _send(channel, _answer(litellm.completion, request["arguments"]))
    os._exit(0)  # nothing that litellm runs in the background may hold the process


def _set_environment(wanted: dict[str, str]) -> bool:
    """Make these the variables of this process: no price list from the network, no .env file that happens to lie around.

    Returns whether they were others before.
    """
    wanted = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_MODE": "PRODUCTION", **wanted}
    changed = wanted != dict(os.environ)
    if changed:
        os.environ.clear()
        os.environ.update(wanted)
    return changed


def _refuse_redirects() -> None:
    """Whoever redirects a request gets no second one: it would carry the key to another place."""
    import httpx

    for client in (httpx.Client, httpx.AsyncClient):
        client.send = _without(client.send, "follow_redirects")  # type: ignore[method-assign]
    try:
        import requests
    except ImportError:
        return
    requests.Session.send = _without(requests.Session.send, "allow_redirects")  # type: ignore[method-assign]


def _without(send: Any, keyword: str) -> Any:
    def once(self: Any, request: Any, **options: Any) -> Any:
        return send(self, request, **{**options, keyword: False})

    return once


def _answer(completion: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    try:
        response = completion(**arguments)
        usage = getattr(response, "usage", None)
        return {"text": str(response.choices[0].message.content or ""), "tokens": int(getattr(usage, "total_tokens", 0) or 0)}
    except Exception as exc:  # a provider's text may hold the prompt or hints about the account: its class is enough
        return {"error": type(exc).__name__}


def _send(channel: IO[str], message: dict[str, Any]) -> None:
    channel.write(json.dumps(message) + "\n")
    channel.flush()


if __name__ == "__main__":
    main()
