"""Decisions of a fit that Lightning leaves to each rank, made by all ranks together.

===========================  ==========================================================================================
decision                     what happens if each rank decides
===========================  ==========================================================================================
to end, after SIGTERM        Lightning broadcasts inside the signal handler, where peers take part in other collectives:
                             ranks wait for each other until the timeout
``val_check_interval`` by    clocks differ: one rank validates while its peers train on
time
===========================  ==========================================================================================
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_prefixed_message

_log = logging.getLogger("lightning.pytorch.trainer.connectors.signal_connector")  # whose place is taken


class AgreedDecisions:
    """Changes a Trainer so that its ranks agree; making one again of the same Trainer changes nothing.

    Args:
        trainer: The Trainer, whose handlers of signals are not registered yet.
        on_any_rank: Tells whether a decision is true on any rank; a collective.
    """

    def __init__(self, trainer: Any, on_any_rank: Callable[[bool], bool]) -> None:
        self._trainer = trainer
        self._on_any_rank = on_any_rank if trainer.world_size > 1 else bool  # no wait for the device on one
        self._received_sigterm = False
        self._loop = trainer.fit_loop.epoch_loop
        trainer._signal_connector._sigterm_notifier_fn = self._note_sigterm
        self._loop._broadcast_sigterm_tensor = lambda: None  # instead of it, as often: before_batch()
        self._loop._should_check_val_fx = self._should_validate

    def before_batch(self) -> None:
        """Let the fit end after this batch if any rank was told to end before it."""
        self._trainer._signal_connector.received_sigterm = self._on_any_rank(self._received_sigterm)

    def after_fit(self) -> None:
        """End now if any rank was told to end after the last batch began.

        Raises:
            SIGTERMException: If so; Lightning ends the process in order then.
        """
        if self._on_any_rank(self._received_sigterm):
            raise SIGTERMException

    def _note_sigterm(self, signum: int, _: Any) -> None:
        """A handler without a collective; outside a fit there is no common point, and each rank ends by itself."""
        trainer = self._trainer
        _log.info(rank_prefixed_message(f"Received SIGTERM: {signum}", trainer.local_rank))
        if trainer.state.fn == TrainerFn.FITTING:
            self._received_sigterm = True
            return
        if trainer.strategy.launcher is not None and not trainer.received_sigterm:
            trainer.strategy.launcher.kill(signum)
        trainer._signal_connector.received_sigterm = True

    def _should_validate(self, data_fetcher: Any) -> bool:
        decision = bool(type(self._loop)._should_check_val_fx(self._loop, data_fetcher))
        by_time = getattr(self._trainer, "_val_check_time_interval", None) is not None
        return self._on_any_rank(decision) if by_time else decision
