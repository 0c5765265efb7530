"""Optuna's sampler for a sweep. This is the only module of the agent that needs more than the standard library."""

from __future__ import annotations

import optuna

from gpurun.remote.agent.runner.number_text import number_of, text_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    Params = dict[str, str]


class Tpe:
    """Optuna's TPE sampler. It proposes settings, and learns from their results."""

    def __init__(self, order: dict[str, Any], earlier_trials: int) -> None:
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self.space = order["space"]
        # After a resume it must not propose its first settings again.
        self.study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=order["seed"] + earlier_trials))
        self.kinds = {name: self.kind_of(axis) for name, axis in self.space.items()}

    def kind_of(self, axis: Any) -> Any:
        """Return the distribution of one setting."""
        kinds = optuna.distributions
        if isinstance(axis, list):
            return kinds.CategoricalDistribution(axis)
        kind = kinds.IntDistribution if axis["whole"] else kinds.FloatDistribution
        return kind(axis["low"], axis["high"], log=axis["log"])

    def ask(self) -> Params:
        """Return the most promising settings."""
        trial = self.study.ask(self.kinds)
        params = {name: value if isinstance(value, str) else text_of(value) for name, value in trial.params.items()}
        # The result is reported later, for the rounded values that the trial gets.
        self.study.tell(trial, state=optuna.trial.TrialState.FAIL)
        return {name: params[name] for name in self.space}

    def tell(self, params: Params, result: float) -> None:
        """Learn the result of some settings."""
        values = {}
        for name, text in params.items():
            axis = self.space[name]
            values[name] = text if isinstance(axis, list) else min(axis["high"], max(axis["low"], number_of(text)))
        self.study.add_trial(optuna.trial.create_trial(params=values, distributions=self.kinds, value=result))
