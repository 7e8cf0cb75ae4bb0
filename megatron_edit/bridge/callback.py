"""`EditCallback`: EDiT in one call of Megatron-Bridge's `pretrain`."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

from megatron_edit.bridge.attach import BridgeAttachment
from megatron_edit.bridge.settings import exit_with
from megatron_edit.errors import EditError, UsageError
from megatron_edit.launcher import is_first_rank

if TYPE_CHECKING:
    from megatron.bridge.training.callbacks import CallbackContext
    from megatron.bridge.training.config import ConfigContainer

    from megatron_edit.bridge.loop import BridgeLoop


class EditCallback:
    """Context manager around `pretrain`, and the callback to give to it.

        with EditCallback(config) as edit:
            pretrain(config, forward_step, callbacks=[edit])

    Entering it cuts the launch into replicas, before torch.distributed is initialized, and checks
    the configuration. Errors of this package end the process with their exit code and one line.

    Args:
        config: with an `EditOptimizerConfig`; the same object must be given to `pretrain`.
    """

    def __init__(self, config: ConfigContainer) -> None:
        self._config = config
        self._attachment: BridgeAttachment | None = None
        self._is_first = is_first_rank()

    def __enter__(self) -> EditCallback:
        try:
            self._attachment = BridgeAttachment(self._config)
            self._attachment.__enter__()
        except EditError as error:
            exit_with(error, is_first=self._is_first)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        attachment, self._attachment = self._attachment, None
        assert attachment is not None, "left before it was entered"
        if isinstance(error, SystemExit) and not error.code:  # Bridge's way of an early end
            kind = error = trace = None
        try:
            if error is None:
                attachment.loop.check_trained()
        except EditError as cause:
            kind, error, trace = type(cause), cause, cause.__traceback__
        found = error if isinstance(error, EditError) else None
        try:
            attachment.__exit__(kind, error, trace)
        except EditError as cause:
            found = cause
        if found is not None:
            exit_with(found, is_first=self._is_first)

    @property
    def _loop(self) -> BridgeLoop:
        if self._attachment is None:
            raise UsageError(
                "EditCallback",
                "must be entered before pretrain",
                "use: with EditCallback(config) as edit: pretrain(..., callbacks=[edit])",
            )
        return self._attachment.loop

    # ---- events of Megatron-Bridge

    def on_data_init_start(self, context: CallbackContext) -> None:
        """Model, optimizer and checkpoint are ready."""
        self._loop.begin(context)

    def on_train_start(self, context: CallbackContext) -> None:
        """The loop begins."""
        self._loop.begin_training()

    def on_train_step_start(self, context: CallbackContext) -> None:
        """A step begins."""
        self._loop.begin_step()

    def on_train_step_end(self, context: CallbackContext) -> None:
        """A step has ended."""
        self._loop.end_step(context)

    def on_checkpoint_save(self, context: CallbackContext) -> None:
        """Megatron-Bridge has written a checkpoint."""
        self._loop.save(context)

    def on_train_end(self, context: CallbackContext) -> None:
        """The loop has ended at the target."""
        self._loop.end_training()

    def on_eval_start(self, context: CallbackContext) -> None:
        """A validation begins."""
        self._loop.begin_evaluation("validation")

    def on_test_start(self, context: CallbackContext) -> None:
        """A test begins."""
        self._loop.begin_evaluation("test")

    def on_eval_step_start(self, context: CallbackContext) -> None:
        """A batch of a validation or test begins."""
        self._loop.count_evaluation_batch()

    def on_eval_end(self, context: CallbackContext) -> None:
        """A validation or test has ended."""
        self._loop.end_evaluation(context)

    on_test_step_start, on_test_end = on_eval_step_start, on_eval_end
