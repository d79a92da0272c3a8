"""Whether keys were rotated at the positions of their tokens, of which a store takes no others."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from quire import errors

__all__ = ["Positions", "are_counted"]

_REMEDY = "give position_ids that count tokens without padding, as generate() does"


@dataclasses.dataclass(frozen=True)
class Positions:
    """Those of what a QuireCache holds."""

    # The first token of each row is at 0, and each other one follows the one before it.
    are_counted: bool = True
    # find() gave the beginning: a forward that counts otherwise would read it as another text.
    must_count: bool = False

    def after(self, new_are_counted: bool) -> Positions:
        """With a forward's. BadStateError if what is held does not go with them."""
        if self.must_count and not new_are_counted:
            raise errors.BadStateError(
                "QuireCache: the new tokens are at other positions than those that follow what was "
                f"found in a store, where padding does not count; {_REMEDY}"
            )
        return dataclasses.replace(self, are_counted=self.are_counted and new_are_counted)

    def check_kept(self) -> None:
        """BadStateError if these are not what find() takes them for."""
        if not self.are_counted:
            raise errors.BadStateError(
                "QuireCache.keep: keys were rotated at other positions than those of their tokens, "
                "or the model does not say at which, so others would find wrong ones; reset(), and "
                + _REMEDY
            )


def are_counted(position_ids: Any, lengths: list[int], shown: torch.Tensor) -> bool:
    """Whether position_ids, [rows or 1, new columns], go on counting the tokens of each row. False
    where the model gives attention none: then nobody can tell.

    lengths: tokens that each row has. shown: bool [rows, new columns], False for padding.
    """
    if not isinstance(position_ids, torch.Tensor):
        return False
    rows, columns = shown.shape
    if position_ids.shape not in ((rows, columns), (1, columns)):
        return False
    counted = torch.tensor(lengths)[:, None] + shown.cumsum(dim=1) - 1
    return bool((position_ids == counted)[shown].all())
