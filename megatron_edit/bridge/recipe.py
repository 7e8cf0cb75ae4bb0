"""The decorator that adds EDiT to a recipe of Megatron-Bridge."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

from megatron_edit.bridge.settings import check_names, edit_config_of, exit_with
from megatron_edit.errors import EditError
from megatron_edit.launcher import is_first_rank

if TYPE_CHECKING:
    from megatron.bridge.training.config import ConfigContainer


def edit_recipe[**P](
    **settings: Any,
) -> Callable[[Callable[P, ConfigContainer]], Callable[P, ConfigContainer]]:
    """Return a decorator that replaces the optimizer of a recipe by an `EditOptimizerConfig`.

    The settings can still be changed in the returned configuration, as `config.optimizer.NAME`,
    before `EditCallback` is made.

    Args:
        settings: fields of `EditConfig`. A wrong name or value ends the process with exit code 2
            and one line.
    """

    def decorate(recipe: Callable[P, ConfigContainer]) -> Callable[P, ConfigContainer]:
        @wraps(recipe)
        def with_edit(*args: P.args, **kwargs: P.kwargs) -> ConfigContainer:
            config = recipe(*args, **kwargs)
            try:
                check_names(settings)
                from megatron_edit.bridge.optimizer_config import EditOptimizerConfig

                config.optimizer = EditOptimizerConfig.of(config.optimizer, settings)
                edit_config_of(config.optimizer, config.optimizer.optimizer)
            except EditError as error:
                exit_with(error, is_first=is_first_rank())
            return config

        return with_edit

    return decorate
