"""Known good and known bad trials: the core's standard control, by the backend on which candidates are judged."""

from agentcompile_core.plugin_api import CONTROL_DEFECTS, NO_TARGET, Backend, ContractError, Trial, control_trials


def trials_for(backend: Backend) -> tuple[tuple[Trial, ...], tuple[Trial, ...]]:
    """The good trial, and one bad trial per defect; the worker judges them for the target of the candidates.

    Raises:
        ContractError: the backend offers no control.
    """
    sources = [backend.control(defect) for defect in ("", *CONTROL_DEFECTS)]
    found = [source for source in sources if source is not None]
    if len(found) != len(sources):
        raise ContractError(f"the backend {backend.name} offers no control kernels, so nothing shows that numerics works on it; "
                            "give it Backend.control")
    trials = control_trials(found, NO_TARGET)
    return trials[:1], trials[1:]
