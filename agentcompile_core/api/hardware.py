"""Which hardware a compilation is for: target, backend and torch device, from what is asked for, installed and here."""

from attrs import evolve, frozen

from ..configuration import Config
from ..errors import StageName, UsageError
from ..ir.target import NO_TARGET, Target
from ..plugin import settings
from ..plugin.catalog import Catalog
from ..plugin.interfaces import Backend

CPU = "cpu"


@frozen(kw_only=True)
class Hardware:
    """``backend`` validates and times kernels for ``target`` on ``device``; None: nothing here can launch them."""

    target: Target
    backend: Backend | None
    device: str


def choose(config: Config, catalog: Catalog, made_for: Target | None = None, run_on: str = "") -> Hardware:
    """Target, backend and device that the configuration names, or the best of what is installed and here.

    ``made_for`` is the target of a bundle. Without one, and without a name, the hardware here is the target; without that,
    the installed target of the highest preference. What is compiled with an emulator lacks the capabilities that the emulator lacks, so
    that nothing is planned that nobody here can run. ``run_on`` is where steps are to run: where that is a backend's name, the
    device is that backend's, and it is the backend unless another one for the same device is named.

    Raises:
        UsageError: something that is named is not installed or not here; the message lists what is.
    """
    catalog, _ = settings.configured(catalog, config)  # whether a backend is available may depend on its settings
    asked = made_for or _asked(config, catalog)
    backend = _named(config, run_on, asked, catalog)
    device = _device(config.device, asked, backend, catalog)
    target = asked or _live(backend, device, catalog) or _preferred(backend, catalog)
    if backend is None:
        backend = _serving(target, device, catalog)
    if made_for is None and backend is not None and backend.emulated:
        target = evolve(target, capabilities=tuple(one for one in target.capabilities if one in backend.features))
    return Hardware(target=target, backend=backend, device=device)


def live(made_for: Target, device: str, catalog: Catalog) -> Target | None:
    """The hardware on which binaries for ``made_for`` would run here, as its backend sees it; None: there is none."""
    backend = catalog.backend_of(made_for)
    return _here(backend, catalog) if backend is not None and backend.device == device else None


def _asked(config: Config, catalog: Catalog) -> Target | None:
    found = catalog.find("agentcompile_targets", config.target) if config.target else None
    assert found is None or isinstance(found, Target)
    return found


def _named(config: Config, run_on: str, asked: Target | None, catalog: Catalog) -> Backend | None:
    """The backend that the configuration or ``run_on`` names, if one of them does; the one that runs steps must be able to."""
    backend = catalog.find("agentcompile_backends", config.backend) if config.backend else None
    assert backend is None or isinstance(backend, Backend)
    runner = next((b for qualified, b in catalog.backends.items() if run_on in (qualified, b.name)), None)
    if runner is None:
        return backend
    answer = catalog.guard(runner.available, stage=StageName.LOAD, plugin=runner.name, subject="available")
    if answer is not True:
        raise UsageError(f"steps cannot run on {run_on!r}: {getattr(answer, 'reason', 'its plugin failed')}")
    if asked is not None and not set(runner.languages) & set(asked.languages):
        raise UsageError(f"{run_on!r} runs kernels in {', '.join(runner.languages)}; those for {asked.name} are in "
                         f"{', '.join(asked.languages) or 'none'}")
    for what, device in (("backend " + config.backend, backend.device if backend else ""), ("--device", config.device)):
        if device and device != runner.device:
            raise UsageError(f"steps are to run on {run_on!r}, which works on the device {runner.device}, and {what} means {device}; "
                             "name one of them only")
    return backend or runner


def _device(asked: str, target: Target | None, backend: Backend | None, catalog: Catalog) -> str:
    """The device that is asked for, else that of what is named, else an accelerator where there is one."""
    here = _accelerator()
    known = {CPU, *(b.device for b in catalog.backends.values()), *([here] if here else [])}
    if asked:
        if asked not in known:
            raise UsageError(f"unknown device {asked!r}; installed backends and torch know: {', '.join(sorted(known))}")
        if asked not in (CPU, here) and not any(b.device == asked and _available(b, catalog) for b in catalog.backends.values()):
            raise UsageError(f"the device {asked} was asked for and there is none here; use --device {here or CPU}")
        return asked
    own = backend or (catalog.backend_of(target) if target is not None else None)
    if own is not None and _available(own, catalog):
        return own.device
    return here or CPU


def _accelerator() -> str:
    import torch

    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return found.type if found is not None else ""


def _live(backend: Backend | None, device: str, catalog: Catalog) -> Target | None:
    """The hardware that is here on ``device``: of several the one that is preferred."""
    some = [backend] if backend is not None else [b for b in catalog.backends.values() if b.device == device]
    return max((found for b in some if (found := _here(b, catalog)) is not None), key=lambda t: t.preference, default=None)


def _preferred(backend: Backend | None, catalog: Catalog) -> Target:
    """The installed target of the highest preference, among those that ``backend`` (where one is named) can run."""
    some = [t for t in catalog.targets.values() if backend is None or set(backend.languages) & set(t.languages)]
    return max(some, key=lambda t: t.preference, default=NO_TARGET)


def _serving(target: Target, device: str, catalog: Catalog) -> Backend | None:
    """The target's own backend where it runs on ``device``, else an emulator of its language."""
    own = catalog.backend_of(target)
    emulators = [b for b in catalog.backends.values() if b.emulated and b is not own and set(b.languages) & set(target.languages)]
    some = [*([own] if own is not None else []), *sorted(emulators, key=lambda b: b.name)]
    return next((b for b in some if b.device == device and _available(b, catalog)), None)


def _available(backend: Backend, catalog: Catalog) -> bool:
    return catalog.guard(backend.available, stage=StageName.LOAD, plugin=backend.name, subject="available") is True


def _here(backend: Backend | None, catalog: Catalog) -> Target | None:
    if backend is None:
        return None
    return catalog.guard(backend.live_target, stage=StageName.LOAD, plugin=backend.name, subject="live target")
